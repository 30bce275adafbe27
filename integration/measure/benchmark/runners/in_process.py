"""Runs pagedkv's own backends with the Python API, in this process."""

from __future__ import annotations

import importlib.metadata
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from pagedkv.plugin import Engine, SamplingParams
from pagedkv.plugin.config import load_config
from pagedkv.plugin.observer import Observers, StepObserver
from pagedkv.plugin.serving.generation import GenerationRequest
from pagedkv.plugin.serving.thread_inbox import ThreadInbox
from pagedkv.plugin.stats import BackendStats
from pagedkv.plugin.text.output_text import OutputText

from .protocol import Recorder, RunEngine, RunRequest


class CacheWatch(StepObserver):
    """Records what the cache holds after each step."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._peak_bytes = self._peak_running = self._sum_in_use = self._sum_reserved = 0

    def on_step(self, duration_s: float, stats: BackendStats) -> None:
        self._peak_bytes = max(self._peak_bytes, stats.kv_bytes_reserved)
        self._peak_running = max(self._peak_running, stats.running)
        self._sum_in_use += stats.kv_bytes_in_use
        self._sum_reserved += stats.kv_bytes_reserved

    def on_change(self, stats: BackendStats) -> None:
        pass

    def describe(self) -> dict[str, Any]:
        """Cache figures of the steps since `restart`. Waste is the share of held bytes without a token."""
        waste = 1 - self._sum_in_use / self._sum_reserved if self._sum_reserved else None
        return {"peak_kv_bytes": self._peak_bytes, "peak_running": self._peak_running, "waste": waste}


class InProcessEngine(RunEngine):
    def __init__(self, options: dict[str, Any]) -> None:
        """Makes an engine. `options` has `overrides` of the config, with the model's path, and maybe `config_file`."""
        config = load_config(options["config_file"], options["overrides"])
        self._watch = CacheWatch()
        self._engine = Engine(config.model.path, config=config, observers=Observers(steps=(self._watch,)))
        self.info = describe_backend(self._engine)

    def run(self, recorder: Recorder) -> dict[str, Any]:
        self._watch.restart()
        inbox = ThreadInbox()
        waiting: deque[int] = deque()
        live: dict[int, tuple[int, OutputText]] = {}
        while not recorder.is_done:
            waiting.extend(recorder.due())
            admitted = self._admit(recorder, waiting, [index for index, _ in live.values()])
            generations = [self._make_generation(recorder.requests[index]) for index in admitted]
            for index, generation in zip(admitted, generations, strict=True):
                live[id(generation)] = (index, OutputText(self._engine.tokenizer, generation.prompt_ids, ()))
            if generations:
                self._engine.loop.start_all(generations, inbox).result()
            if not live:
                recorder.wait()
                continue
            for sample, output in inbox.read(recorder.next_arrival_in_s):
                index, text = live[id(sample.generation)]
                text.push(output.token.token_id)
                recorder.count(index, num_cached_tokens=output.num_cached_tokens)
                if output.finish_reason is not None:
                    del live[id(sample.generation)]
        return self._watch.describe()

    def _admit(self, recorder: Recorder, waiting: deque[int], live: Sequence[int]) -> list[int]:
        """Takes from `waiting` the requests that are sent to the engine now: all of them."""
        admitted = list(waiting)
        waiting.clear()
        return admitted

    def close(self) -> None:
        self._engine.close()

    @staticmethod
    def _make_generation(request: RunRequest) -> GenerationRequest:
        params = SamplingParams(max_new_tokens=request.max_new_tokens, ignore_eos=True)
        return GenerationRequest(request.prompt_ids, params)


def describe_backend(engine: Engine) -> dict[str, Any]:
    info, stats = engine.backend.info, engine.stats()
    return {
        "engine": f"pagedkv {info.backend}",
        "version": importlib.metadata.version("pagedkv"),
        "torch": torch.__version__,
        "dtype": str(info.dtype).removeprefix("torch."),
        "kv_dtype": info.kv_dtype.name,
        "attention": info.attention_kernels,
        "threads": engine.config.num_threads,
        "kv_cache_bytes": stats.kv_bytes_total,
    }


def load(options: dict[str, Any]) -> InProcessEngine:
    return InProcessEngine(options)
