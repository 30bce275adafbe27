"""Runs transformers' own `generate` on static batches, padded on the left, like a server without scheduling.

All requests that have arrived form a batch, which runs until its longest answer is done. Later requests wait for that.
"""

from __future__ import annotations

from typing import Any

from .protocol import Recorder, RunEngine


class TransformersEngine(RunEngine):
    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        import transformers

        self._torch = torch
        dtype = options["dtype"]
        self._model = transformers.AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype).eval()
        # No row ends early, and nothing is sampled.
        self._model.generation_config = transformers.GenerationConfig(do_sample=False)
        self.info = {
            "engine": "transformers",
            "version": transformers.__version__,
            "torch": torch.__version__,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }

    def run(self, recorder: Recorder) -> dict[str, Any]:
        while not recorder.is_done:
            indices = recorder.due()
            if indices:
                self._run_batch(recorder, indices)
            else:
                recorder.wait()
        return {}

    def _run_batch(self, recorder: Recorder, indices: list[int]) -> None:
        requests = [recorder.requests[index] for index in indices]
        width = max(len(request.prompt_ids) for request in requests)
        rows = [[0] * (width - len(request.prompt_ids)) + request.prompt_ids for request in requests]
        mask = [[0] * (width - len(request.prompt_ids)) + [1] * len(request.prompt_ids) for request in requests]

        def count_tokens(input_ids: Any, scores: Any, **_: Any) -> Any:
            for index, request in zip(indices, requests, strict=True):
                if recorder.times[index].num_tokens < request.max_new_tokens:
                    recorder.count(index)
            return self._torch.zeros(len(indices), dtype=self._torch.bool)

        with self._torch.inference_mode():
            self._model.generate(
                self._torch.tensor(rows),
                attention_mask=self._torch.tensor(mask),
                max_new_tokens=max(request.max_new_tokens for request in requests),
                pad_token_id=0,
                stopping_criteria=[count_tokens],
            )


def load(options: dict[str, Any]) -> TransformersEngine:
    return TransformersEngine(options)
