"""Runs pagedkv's own backends with the Python API, in this process."""

from __future__ import annotations

import importlib.metadata
import itertools
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, cast

import torch

from pagedkv.plugin import Engine, SamplingParams
from pagedkv.plugin.config import load_config
from pagedkv.plugin.engine.stream import TokenStream
from pagedkv.plugin.interface import Backend
from pagedkv.plugin.requests import Request, RequestId, StepOutput

from .protocol import Recorder, RunEngine


class TimedBackend:
    """A backend that reports its tokens to a recorder, and records what its cache holds after each step.

    Everything else is passed to the backend.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.watch(Recorder([]))

    def watch(self, recorder: Recorder) -> None:
        """Sets the recorder. The next requests are those of this recorder, in their order."""
        self._recorder = recorder
        self._indices: dict[RequestId, int] = {}
        self._next_index = itertools.count()
        self._peak_bytes = self._peak_running = self._sum_in_use = self._sum_reserved = 0

    def describe_cache(self) -> dict[str, Any]:
        """Returns cache figures of the steps since `watch`. Waste is the share of held bytes without a token."""
        waste = 1 - self._sum_in_use / self._sum_reserved if self._sum_reserved else None
        return {"peak_kv_bytes": self._peak_bytes, "peak_running": self._peak_running, "waste": waste}

    def add(self, requests: Sequence[Request]) -> None:
        self._backend.add(requests)
        for request in requests:
            self._indices[request.id] = next(self._next_index)

    def step(self, only: Collection[RequestId] | None = None) -> list[StepOutput]:
        outputs = self._backend.step(only)
        for output in outputs:
            self._recorder.count(self._indices[output.request_id], num_cached_tokens=output.num_cached_tokens)
        stats = self._backend.stats()
        self._peak_bytes = max(self._peak_bytes, stats.kv_bytes_reserved)
        self._peak_running = max(self._peak_running, stats.running)
        self._sum_in_use += stats.kv_bytes_in_use
        self._sum_reserved += stats.kv_bytes_reserved
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class InProcessEngine(RunEngine):
    def __init__(self, options: dict[str, Any]) -> None:
        """Makes an engine. `options` has `overrides` of the config, with the model's path, and maybe `config_file`."""
        config = load_config(options["config_file"], options["overrides"])
        self._engine = Engine(config.model.path, config=config)
        self._backend = TimedBackend(self._engine.backend)
        self._engine.backend = cast("Backend", self._backend)
        self.info = describe_backend(self._engine)

    def run(self, recorder: Recorder) -> dict[str, Any]:
        self._backend.watch(recorder)
        streams: deque[TokenStream] = deque()
        while not recorder.is_done:
            streams.extend(self._add(recorder, index) for index in recorder.due())
            if not streams:
                recorder.wait()
            # A step generates tokens for all streams; the other streams buffer them.
            elif next(streams[0], None) is None:
                streams.popleft()
        return self._backend.describe_cache()

    def close(self) -> None:
        self._engine.close()

    def _add(self, recorder: Recorder, index: int) -> TokenStream:
        request = recorder.requests[index]
        params = SamplingParams(max_new_tokens=request.max_new_tokens, ignore_eos=True)
        return self._engine.stream(request.prompt_ids, params)


def describe_backend(engine: Engine) -> dict[str, Any]:
    info, stats = engine.backend.info, engine.stats()
    return {
        "engine": f"pagedkv {info.backend}",
        "version": importlib.metadata.version("pagedkv"),
        "torch": torch.__version__,
        "dtype": str(info.dtype).removeprefix("torch."),
        "kv_dtype": info.kv_dtype.name,
        "attention": info.attention_kernels,
        "threads": torch.get_num_threads(),
        "kv_cache_bytes": stats.kv_bytes_total,
    }


def load(options: dict[str, Any]) -> InProcessEngine:
    return InProcessEngine(options)
