"""Drives shards as a router does, with probes and refused requests beside streams, for as long as is asked.

    pagedkv serve MODEL --num-shards 2 --uds-path SOCKET
    python tests/integration/serve/shard_traffic.py SOCKET 2 --seconds 600

Prints what was done and found as JSON; its exit code is 1 where anything but a refused request failed, or where a
stream's tokens differ from those of its prompt alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub

NUM_STREAMS = 12
NUM_PROMPTS = 24
PROBE_ID = 2**64 - 1
PROBE_INTERVAL_S = 0.1
REFUSED_INTERVAL_S = 0.5
GONE_SHARE = 0.1
"""Of the streams whose client goes away half way."""
CALL_TIMEOUT_S = 60.0


@dataclass
class Report:
    seconds: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    num_streams: int = 0
    """That ended with the tokens that their prompt gives alone."""
    num_gone: int = 0
    num_probes: int = 0
    num_refused: Counter[str] = field(default_factory=Counter)
    step_ms: dict[str, float] = field(default_factory=dict)
    """Of a Decode, as a client sees it."""
    faults: list[str] = field(default_factory=list)


@dataclass
class Stream:
    prompt: str
    num_tokens: int
    gone_after: int | None
    tokens: list[int] = field(default_factory=list)


def make_request(request_id: int, text: str, num_tokens: int, **parameters: Any) -> pb.Request:
    return pb.Request(
        id=request_id,
        inputs=text,
        input_chunks=pb.Input(chunks=[pb.InputChunk(text=text)]),
        truncate=200,
        add_special_tokens=True,
        parameters=pb.NextTokenChooserParameters(
            temperature=1, top_p=1, typical_p=1, repetition_penalty=1, **parameters
        ),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=num_tokens, ignore_eos_token=True),
    )


def make_batch(batch_id: int, requests: list[pb.Request]) -> pb.Batch:
    return pb.Batch(id=batch_id, requests=requests, size=len(requests))


class Router:
    """One loop of Prefill and Decode over one batch, and calls beside it."""

    def __init__(self, socket: str, num_shards: int, seed: int) -> None:
        self._channels = [grpc.aio.insecure_channel(f"unix:{socket}-{rank}") for rank in range(num_shards)]
        self._stubs = [TextGenerationServiceStub(channel) for channel in self._channels]
        self._random = random.Random(seed)
        self._last_id = 0
        self._expected: dict[str, list[int]] = {}
        self._streams: dict[int, Stream] = {}
        self._refused: set[int] = set()
        self._wants_refused = False
        self._is_over = False
        self._step_s: list[float] = []
        self.report = Report()

    async def run(self, seconds: float) -> None:
        await self._call("ClearCache", pb.ClearCacheRequest())
        await self._find_expected()
        started_s = time.monotonic()
        beside = [asyncio.create_task(part) for part in (self._probe_often(), self._refuse_often())]
        await self._serve(started_s + seconds)
        self._is_over = True
        await asyncio.gather(*beside)
        self.report.seconds = round(time.monotonic() - started_s, 1)
        ordered = sorted(self._step_s)
        for name, share in (("median", 0.5), ("p99", 0.99)):
            self.report.step_ms[name] = round(1e3 * ordered[int(share * (len(ordered) - 1))], 3)
        for channel in self._channels:
            await channel.close()

    async def _call(self, method: str, request: Any) -> list[Any]:
        """All shards at once; raises the first error."""
        return await asyncio.gather(*(getattr(stub, method)(request, timeout=CALL_TIMEOUT_S) for stub in self._stubs))

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    async def _find_expected(self) -> None:
        """Each prompt alone."""
        words = ["one", "two", "three", "red", "green", "blue", "north", "south", "east", "west"]
        for _ in range(NUM_PROMPTS):
            prompt = " ".join(self._random.choices(words, k=self._random.choice([2, 8, 40, 120])))
            request = make_request(self._next_id(), prompt, 80)
            answers = await self._call("Prefill", pb.PrefillRequest(batch=make_batch(self._next_id(), [request])))
            tokens: list[int] = []
            while True:
                tokens += [
                    id_ for answer in answers for generation in answer.generations for id_ in generation.tokens.ids
                ]
                if not answers[0].HasField("batch"):
                    break
                answers = await self._call("Decode", pb.DecodeRequest(batches=[answers[0].batch]))
            self._expected[prompt] = tokens

    async def _serve(self, until_s: float) -> None:
        batch: pb.CachedBatch | None = None
        while batch is not None or time.monotonic() < until_s:
            new = self._new_requests() if time.monotonic() < until_s else []
            if new:
                prefill = pb.PrefillRequest(batch=make_batch(self._next_id(), new), cached_batch=batch)
                answers = await self._call("Prefill", prefill)
            else:
                started_s = time.perf_counter()
                assert batch is not None
                answers = await self._call("Decode", pb.DecodeRequest(batches=[batch]))
                self._step_s.append(time.perf_counter() - started_s)
            self.report.num_steps += 1
            batch = await self._take(answers)

    def _new_requests(self) -> list[pb.Request]:
        requests = []
        if len(self._streams) < NUM_STREAMS:
            request_id, prompt = self._next_id(), self._random.choice(sorted(self._expected))
            num_tokens = self._random.randint(1, 80)
            gone_after = self._random.randint(0, num_tokens) if self._random.random() < GONE_SHARE else None
            self._streams[request_id] = Stream(prompt, num_tokens, gone_after)
            requests.append(make_request(request_id, prompt, num_tokens))
        if self._wants_refused:
            self._wants_refused = False
            request_id = self._next_id()
            self._refused.add(request_id)
            grammar = {"grammar": '{"type": "object"}', "grammar_type": pb.GRAMMAR_TYPE_JSON}
            requests.append(make_request(request_id, "a list", 20, **grammar))
        return requests

    async def _take(self, answers: list[Any]) -> pb.CachedBatch | None:
        if any(answer.batch != answers[0].batch for answer in answers):
            self.report.faults.append("the shards' batches differ")
        for generation in (generation for answer in answers for generation in answer.generations):
            if generation.request_id in self._refused:
                self._refused.remove(generation.request_id)
                self.report.num_refused["grammar"] += 1
            elif (stream := self._streams.get(generation.request_id)) is None:
                self.report.faults.append(f"a token of {generation.request_id}, which is not live")
            else:
                self._take_token(generation, stream)
        if not answers[0].HasField("batch"):
            return None
        return await self._drop_gone(answers[0].batch)

    def _take_token(self, generation: pb.Generation, stream: Stream) -> None:
        stream.tokens += generation.tokens.ids
        self.report.num_tokens += 1
        if stream.tokens != self._expected[stream.prompt][: len(stream.tokens)]:
            self.report.faults.append(f"request {generation.request_id} has other tokens than its prompt alone")
        if generation.HasField("generated_text"):
            del self._streams[generation.request_id]
            self.report.num_streams += len(stream.tokens) == stream.num_tokens

    async def _drop_gone(self, batch: pb.CachedBatch) -> pb.CachedBatch | None:
        gone = [
            request_id
            for request_id in batch.request_ids
            if (after := self._streams[request_id].gone_after) is not None
            and len(self._streams[request_id].tokens) >= after
        ]
        if not gone:
            return batch
        self.report.num_gone += len(gone)
        for request_id in gone:
            del self._streams[request_id]
        kept = [request_id for request_id in batch.request_ids if request_id not in gone]
        if not kept:
            await self._call("ClearCache", pb.ClearCacheRequest(id=batch.id))
            return None
        (filtered, *_) = await self._call("FilterBatch", pb.FilterBatchRequest(batch_id=batch.id, request_ids=kept))
        return filtered.batch

    async def _probe_often(self) -> None:
        request = make_request(PROBE_ID, "liveness", 1)
        probes = []
        while not self._is_over:
            probes.append(asyncio.create_task(self._probe(request)))
            await asyncio.sleep(PROBE_INTERVAL_S)
        await asyncio.gather(*probes)

    async def _probe(self, request: pb.Request) -> None:
        try:
            answers = await self._call("Prefill", pb.PrefillRequest(batch=make_batch(PROBE_ID, [request])))
            ids = [generation.request_id for answer in answers for generation in answer.generations]
            if ids != [PROBE_ID]:
                self.report.faults.append(f"a probe has generations of {ids}")
            self.report.num_probes += 1
        except grpc.RpcError as error:
            self.report.faults.append(f"a probe failed: {error.code()} {error.details()}")

    async def _refuse_often(self) -> None:
        """In turn: a request that is refused alone, beside the streams, and a call that fails."""
        while not self._is_over:
            self._wants_refused = True
            await asyncio.sleep(REFUSED_INTERVAL_S)
            unknown = pb.CachedBatch(id=self._next_id())
            batch = make_batch(self._next_id(), [make_request(self._next_id(), "lost", 5)])
            answers = await asyncio.gather(
                *(stub.Prefill(pb.PrefillRequest(batch=batch, cached_batch=unknown)) for stub in self._stubs),
                return_exceptions=True,
            )
            codes = {answer.code() if isinstance(answer, grpc.RpcError) else None for answer in answers}
            if codes == {grpc.StatusCode.NOT_FOUND}:
                self.report.num_refused["unknown batch"] += 1
            else:
                self.report.faults.append(f"a Prefill with an unknown batch was answered with {codes}")
            await asyncio.sleep(REFUSED_INTERVAL_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("socket")
    parser.add_argument("num_shards", type=int)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    async def run() -> Report:
        router = Router(arguments.socket, arguments.num_shards, arguments.seed)
        await router.run(arguments.seconds)
        return router.report

    report = asyncio.run(run())
    print(json.dumps(vars(report)))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
