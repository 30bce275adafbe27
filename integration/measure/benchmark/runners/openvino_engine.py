"""Runs OpenVINO GenAI's continuous batching on a CPU, with prefix caching. A GGUF file keeps its 4-bit weights."""

from __future__ import annotations

import importlib.metadata
import itertools
from pathlib import Path
from typing import Any

from .protocol import Recorder, RunEngine


class OpenVinoEngine(RunEngine):
    def __init__(self, options: dict[str, Any]) -> None:
        import openvino  # type: ignore[import-not-found, unused-ignore]  # of its own interpreter
        import openvino_genai  # type: ignore[import-not-found, unused-ignore]  # of its own interpreter

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = max(1, round(options["kv_bytes"] / 2**30))
        scheduler.enable_prefix_caching = True
        self._genai, self._make_tensor = openvino_genai, openvino.Tensor
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(options["model"], scheduler, "CPU")
        self._ids = itertools.count()
        self.info = {
            "engine": "openvino",
            "version": importlib.metadata.version("openvino-genai"),
            "dtype": f"weights of {Path(options['model']).name}",
            "kv_cache_bytes": scheduler.cache_size * 2**30,
        }

    def run(self, recorder: Recorder) -> dict[str, Any]:
        handles: dict[int, Any] = {}
        while not recorder.is_done:
            for index in recorder.due():
                handles[index] = self._add(recorder, index)
            if not self._pipeline.has_non_finished_requests():
                recorder.wait()
                continue
            self._pipeline.step()
            for index, handle in handles.items():
                while handle.can_read():
                    recorder.count(index, sum(len(output.generated_ids) for output in handle.read().values()))
            for index in [index for index in handles if self._is_over(recorder, index)]:
                del handles[index]
        return {}

    def _add(self, recorder: Recorder, index: int) -> Any:
        import numpy as np

        request = recorder.requests[index]
        config = self._genai.GenerationConfig()
        config.max_new_tokens = request.max_new_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = self._make_tensor(np.array([request.prompt_ids], dtype=np.int64))
        return self._pipeline.add_request(next(self._ids), ids, config)

    @staticmethod
    def _is_over(recorder: Recorder, index: int) -> bool:
        return recorder.times[index].num_tokens == recorder.requests[index].max_new_tokens


def load(options: dict[str, Any]) -> OpenVinoEngine:
    return OpenVinoEngine(options)
