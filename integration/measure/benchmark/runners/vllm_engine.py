"""Runs vLLM on a CPU with `vllm.LLM` and prefix caching: with its default set-up, or in one process on all cores.

By default it uses several processes, and computes on all cores but one, which the other processes use. On two cores,
one process that computes on both was faster (3.1 s against 5.5 s for the workload `short`); several processes that do
so were slower (9.4 s). Both set-ups are peers, so that both can be compared.
"""

from __future__ import annotations

import os
from typing import Any

from .protocol import Recorder, RunEngine


class VllmEngine(RunEngine):
    def __init__(self, options: dict[str, Any], is_one_process: bool = False) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        if is_one_process:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        import vllm  # type: ignore[import-not-found, unused-ignore]  # of its own interpreter

        self._llm = vllm.LLM(
            model=options["model"],
            dtype=options["dtype"],
            max_model_len=options["max_total_tokens"],
            enable_prefix_caching=True,
            # Without a size it allocates most of the machine's memory, which other engines need.
            kv_cache_memory_bytes=options["kv_bytes"],
        )
        self._engine = self._llm.llm_engine
        self._num_requests = 0
        model_config = self._engine.model_config
        self.info = {
            "engine": "vllm",
            "version": vllm.__version__,
            "dtype": str(model_config.dtype).removeprefix("torch."),
            "set_up": "one process, all cores" if is_one_process else "default",
            "kv_cache_bytes": options["kv_bytes"],
        }

    def run(self, recorder: Recorder) -> dict[str, Any]:
        first_id = self._num_requests
        self._num_requests += len(recorder.requests)
        while not recorder.is_done:
            for index in recorder.due():
                self._add(str(first_id + index), recorder, index)
            if not self._engine.has_unfinished_requests():
                recorder.wait()
                continue
            for output in self._engine.step():
                num_tokens = len(output.outputs[0].token_ids)
                recorder.count(int(output.request_id) - first_id, num_tokens, output.num_cached_tokens)
        return {}

    def _add(self, request_id: str, recorder: Recorder, index: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found, unused-ignore]  # of its own interpreter

        request = recorder.requests[index]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.max_new_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(request_id, {"prompt_token_ids": request.prompt_ids}, params)


def load(options: dict[str, Any]) -> VllmEngine:
    return VllmEngine(options)


def load_one_process(options: dict[str, Any]) -> VllmEngine:
    return VllmEngine(options, is_one_process=True)
