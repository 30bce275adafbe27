"""Runs llama.cpp with its Python binding, which serves one request after the other."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Any

from .protocol import Recorder, RunEngine


class LlamaCppEngine(RunEngine):
    def __init__(self, options: dict[str, Any]) -> None:
        import llama_cpp  # type: ignore[import-not-found, unused-ignore]  # of its own interpreter

        num_threads = len(os.sched_getaffinity(0))
        self._llama = llama_cpp.Llama(
            options["model"],
            n_ctx=options["max_total_tokens"],
            n_threads=num_threads,
            n_threads_batch=num_threads,
            verbose=False,
        )
        self.info = {
            "engine": "llama-cpp",
            "version": importlib.metadata.version("llama-cpp-python"),
            "dtype": f"weights of {Path(options['model']).name}",
            "threads": num_threads,
        }

    def run(self, recorder: Recorder) -> dict[str, Any]:
        while not recorder.is_done:
            indices = recorder.due()
            for index in indices:
                self._generate(recorder, index)
            if not indices:
                recorder.wait()
        return {"peak_running": 1}

    def _generate(self, recorder: Recorder, index: int) -> None:
        request = recorder.requests[index]
        for _ in self._llama.generate(request.prompt_ids, temp=0.0, top_k=1, repeat_penalty=1.0):
            recorder.count(index)
            if recorder.times[index].num_tokens == request.max_new_tokens:
                return


def load(options: dict[str, Any]) -> LlamaCppEngine:
    return LlamaCppEngine(options)
