"""Measures a decode step in the server and in `Engine`: `python integration/measure/micro/server_step.py [--json]`.

One sitting: an engine in this process, and a server of the same model in another, take turns at each number of rows.

- engine: a step of `Engine`, used from the thread that made it.
- other thread: the same engine, used from another thread.
- tgi: the server's `forward_ns`, called step by step.
- tgi, paused: the same with PAUSE_S between an answer and the next call.
- smg: a step of the same server under streams of the SMG gateway's protocol, from its metrics. Meanwhile tokens of the
  step before are sent and read: server and client take the step's own cores where there are no others. The client's
  part is told beside it.

Each is the mean of the decode steps of an answer, and of those the median of NUM_REPETITIONS. Held against the engine's
step times MAX_RATIO.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families

from pagedkv.adapters.smg import engine_pb2 as smg
from pagedkv.adapters.smg.handlers import SERVICE_NAME
from pagedkv.adapters.tgi import generate_pb2 as tgi
from pagedkv.adapters.tgi.client import KEEP_ALL_TOKENS
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub
from pagedkv.integration.measure.benchmark.workloads import draw_plain_tokens, to_text
from pagedkv.integration.serve.child_process import child_server
from pagedkv.plugin import Engine, SamplingParams
from pagedkv.plugin.observer import Observers
from pagedkv.plugin.stats import BackendStats

ROW_COUNTS = (1, 2, 4, 8, 16, 32)
NUM_REPETITIONS = 3
NUM_PROMPT_TOKENS = 64
NUM_NEW_TOKENS = 40
PAUSE_S = 0.002
MAX_RATIO = 1.1
SETTINGS = {"cache.memory": "1GiB", "limits.max_total_tokens": 1024}
_MARGIN_TOKENS = 3
"""Tokens at a stream's beginning and end that are not measured, in streams beside others."""
STEP_DURATION = "pagedkv_step_duration_seconds"

Prompts = Sequence[Sequence[int]]
DecodeSteps = tuple[float, float]
"""Number and total seconds of a server's steps that computed one token of each request, since it started."""
Measure = Callable[[Prompts], float]
"""Answers prompts at once; returns the mean of the decode steps, in seconds."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of one number of rows, in milliseconds by mode."""

    num_rows: int
    step_ms: Mapping[str, float]
    client_ms: float
    """Processor time of the streams' client, a step."""

    def ratios(self) -> dict[str, float]:
        """Of each mode to the engine."""
        return {mode: ms / self.step_ms["engine"] for mode, ms in self.step_ms.items()}


@dataclass(slots=True)
class StepWatch:
    """Keeps the durations of steps that computed one token of each request."""

    durations_s: list[float] = field(default_factory=list)
    _num_prefill_tokens: int = 0

    def on_step(self, duration_s: float, stats: BackendStats) -> None:
        if stats.computed_prefill_tokens == self._num_prefill_tokens:
            self.durations_s.append(duration_s)
        self._num_prefill_tokens = stats.computed_prefill_tokens

    def on_change(self, stats: BackendStats) -> None:
        """Only steps are counted."""


class EngineSteps:
    def __init__(self, engine: Engine, watch: StepWatch) -> None:
        self._engine, self._watch = engine, watch

    def measure(self, prompts: Prompts) -> float:
        self._watch.durations_s.clear()
        self._engine.generate(prompts, SamplingParams(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True))
        return mean(self._watch.durations_s)

    def measure_on_other_thread(self, prompts: Prompts) -> float:
        results: list[float] = []
        thread = threading.Thread(target=lambda: results.append(self.measure(prompts)))
        thread.start()
        thread.join()
        return results[0]


class TgiSteps:
    def __init__(self, channel: grpc.Channel, to_text: Callable[[Sequence[int]], str]) -> None:
        self._stub = TextGenerationServiceStub(channel)
        self._to_text = to_text

    def measure(self, prompts: Prompts, pause_s: float = 0.0) -> float:
        requests = [self._request(number, prompt) for number, prompt in enumerate(prompts)]
        answer = self._stub.Prefill(tgi.PrefillRequest(batch=tgi.Batch(id=1, requests=requests, size=len(requests))))
        steps_ns = []
        while answer.HasField("batch"):
            time.sleep(pause_s)
            answer = self._stub.Decode(tgi.DecodeRequest(batches=[answer.batch]))
            steps_ns.append(answer.forward_ns)
        return mean(steps_ns) / 1e9

    def measure_paused(self, prompts: Prompts) -> float:
        return self.measure(prompts, PAUSE_S)

    def _request(self, number: int, prompt: Sequence[int]) -> tgi.Request:
        return tgi.Request(
            id=number,
            inputs=self._to_text(prompt),
            truncate=KEEP_ALL_TOKENS,
            parameters=tgi.NextTokenChooserParameters(temperature=1, top_p=1, typical_p=1, repetition_penalty=1),
            stopping_parameters=tgi.StoppingCriteriaParameters(max_new_tokens=NUM_NEW_TOKENS, ignore_eos_token=True),
        )


class SmgSteps:
    def __init__(self, target: str, metrics_url: str) -> None:
        self._target, self._metrics_url = target, metrics_url
        self.client_s = 0.0
        """Processor time of this process, a step, in the last answer."""

    def measure(self, prompts: Prompts) -> float:
        """Counts the steps while all streams run, for they begin in different ones; all if those were too quick."""
        before, started_s = self._read_decode_steps(), time.process_time()
        first, last = asyncio.run(self._stream_all(prompts))
        spent_s, after = time.process_time() - started_s, self._read_decode_steps()
        self.client_s = spent_s / (after[0] - before[0])
        if last[0] == first[0]:
            first, last = before, after
        return (last[1] - first[1]) / (last[0] - first[0])

    async def _stream_all(self, prompts: Prompts) -> tuple[DecodeSteps, DecodeSteps]:
        """Returns the server's decode steps when all streams run, and when the first is about to end."""
        num_tokens = [0] * len(prompts)
        all_run, one_ends = asyncio.Event(), asyncio.Event()

        async def stream(row: int) -> None:
            async for answer in generate(self._request(prompts[row])):
                num_tokens[row] += len(answer.chunk.token_ids)
                if min(num_tokens) >= _MARGIN_TOKENS:
                    all_run.set()
                if num_tokens[row] >= NUM_NEW_TOKENS - _MARGIN_TOKENS:
                    one_ends.set()

        async with grpc.aio.insecure_channel(self._target) as channel:
            await channel.channel_ready()
            generate = channel.unary_stream(
                f"/{SERVICE_NAME}/Generate", smg.GenerateRequest.SerializeToString, smg.GenerateResponse.FromString
            )
            streams = asyncio.gather(*map(stream, range(len(prompts))))
            await all_run.wait()
            first = await asyncio.to_thread(self._read_decode_steps)
            await one_ends.wait()
            last = await asyncio.to_thread(self._read_decode_steps)
            await streams
        return first, last

    @staticmethod
    def _request(prompt: Sequence[int]) -> smg.GenerateRequest:
        params = smg.SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
        return smg.GenerateRequest(
            request_id=f"{time.monotonic_ns()}-{prompt[0]}",
            tokenized=smg.TokenizedInput(input_ids=prompt),
            sampling_params=params,
            stream=True,
        )

    def _read_decode_steps(self) -> DecodeSteps:
        with urllib.request.urlopen(self._metrics_url) as answer:  # noqa: S310 - our own server's
            families = list(text_string_to_metric_families(answer.read().decode()))
        values = {
            sample.name: sample.value
            for family in families
            for sample in family.samples
            if family.name == STEP_DURATION and sample.labels.get("phase") == "decode"
        }
        return values[f"{STEP_DURATION}_count"], values[f"{STEP_DURATION}_sum"]


def measure(model: Path, row_counts: Sequence[int] = ROW_COUNTS, repetitions: int = NUM_REPETITIONS) -> list[StepTimes]:
    """Starts engine and server of a model, and measures each number of rows by turns."""
    watch = StepWatch()
    with (
        tempfile.TemporaryDirectory(prefix="pagedkv-") as folder,
        child_server(_serve_arguments(model), Path(folder, "log")) as server,
        grpc.insecure_channel(server.target) as channel,
        Engine(model, config=SETTINGS, observers=Observers(steps=(watch,))) as engine,
    ):
        streamed = SmgSteps(server.target, server.summary["metrics_urls"][0])
        modes = _make_modes(engine, watch, channel) | {"smg": streamed.measure}
        token_ids = draw_plain_tokens(engine.tokenizer, engine.backend.info.model.vocab_size, seed=0)
        times = []
        for num_rows in row_counts:
            prompts = [
                [token_ids[(row * NUM_PROMPT_TOKENS + index) % len(token_ids)] for index in range(NUM_PROMPT_TOKENS)]
                for row in range(num_rows)
            ]
            rounds = [{mode: run(prompts) for mode, run in modes.items()} for _ in range(repetitions)]
            step_ms = {mode: median(one[mode] for one in rounds) * 1e3 for mode in modes}
            times.append(StepTimes(num_rows, step_ms, streamed.client_s * 1e3))
        return times


def _serve_arguments(model: Path) -> list[str]:
    settings = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    return [str(model), "--listen", "127.0.0.1:0", "--protocol", "tgi,smg", *settings]


def _make_modes(engine: Engine, watch: StepWatch, channel: grpc.Channel) -> dict[str, Measure]:
    own = EngineSteps(engine, watch)
    called = TgiSteps(channel, lambda prompt: to_text(engine.tokenizer, prompt))
    return {
        "engine": own.measure,
        "other thread": own.measure_on_other_thread,
        "tgi": called.measure,
        "tgi, paused": called.measure_paused,
    }


def find_missed_bars(times: Sequence[StepTimes]) -> list[tuple[int, str]]:
    """Number of rows and mode of each step that is too slow."""
    return [(one.num_rows, mode) for one in times for mode, ratio in one.ratios().items() if ratio > MAX_RATIO]


def _to_table(times: Sequence[StepTimes]) -> str:
    modes = list(times[0].step_ms)
    lines = [f"| rows | {' | '.join(modes)} | client of smg |", f"|---|{'---|' * len(modes)}---|"]
    for one in times:
        ratios = one.ratios()
        cells = [
            f"{one.step_ms[mode]:.1f} ms" + ("" if mode == "engine" else f" ({ratios[mode]:.2f}×)") for mode in modes
        ]
        lines.append(f"| {one.num_rows} | {' | '.join(cells)} | {one.client_ms:.1f} ms |")
    return "\n".join(lines)


def main() -> int:
    """Returns 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--model", type=Path, help="the demo model if left out")
    parser.add_argument("--rows", default=",".join(map(str, ROW_COUNTS)), help="numbers of sequences, with commas")
    parser.add_argument("--repetitions", type=int, default=NUM_REPETITIONS)
    arguments = parser.parse_args()

    from pagedkv.integration.demo_model import ensure_demo_model

    row_counts = [int(count) for count in arguments.rows.split(",")]
    times = measure(arguments.model or ensure_demo_model(), row_counts, arguments.repetitions)
    missed = find_missed_bars(times)
    if arguments.json:
        steps: list[dict[str, Any]] = [asdict(one) for one in times]
        print(json.dumps({"steps": steps, "is_met": not missed}))
    else:
        print(_to_table(times))
        for num_rows, mode in missed:
            print(f"missed: {mode} at {num_rows} rows takes more than {MAX_RATIO:g} × the engine's step")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
