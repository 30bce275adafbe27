"""Rows of a client that asks for no step any more give way, and go on where they were when it comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from pagedkv.adapters.transformers.contiguous_backend import ContiguousBackend
from pagedkv.adapters.transformers.idle_rows import MAX_STEPS_IN_VAIN
from pagedkv.plugin.interface import WarmupLimits
from pagedkv.plugin.requests import Request, RequestId, SamplingParams

LENGTH = 12
PROMPTS = {RequestId(i): [3 + (7 * i + j) % 90 for j in range(5 + 3 * i)] for i in range(1, 5)}


@pytest.fixture
def backend(tiny_model: Callable[[str], Any], resolved: Callable[..., Any]) -> ContiguousBackend:
    """Room for two requests."""
    made = ContiguousBackend.create(resolved(tiny_model("llama"), cache={"num_blocks": 8}))
    made.warmup(WarmupLimits(max_input_tokens=40, max_total_tokens=64))
    return made


def request(id_: RequestId) -> Request:
    return Request(id_, PROMPTS[id_], SamplingParams(max_new_tokens=LENGTH, ignore_eos=True))


def run(backend: ContiguousBackend, ids: list[RequestId], num_steps: int) -> dict[RequestId, list[int]]:
    tokens: dict[RequestId, list[int]] = {id_: [] for id_ in ids}
    for _ in range(num_steps):
        for output in backend.step(only=ids):
            tokens[output.request_id].append(output.token.token_id)
    return tokens


def expected(tiny_model: Callable[[str], Any], id_: RequestId) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPTS[id_]])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False)
    return output[0, ids.shape[1] :].tolist()


def test_idle_rows_give_way_and_are_computed_again(
    backend: ContiguousBackend, tiny_model: Callable[[str], Any]
) -> None:
    gone, live = [RequestId(1), RequestId(2)], [RequestId(3), RequestId(4)]
    backend.add([request(id_) for id_ in gone])
    before = run(backend, gone, 4)
    assert all(before.values())
    backend.add([request(id_) for id_ in live])
    waited = run(backend, live, MAX_STEPS_IN_VAIN - 1)
    assert not any(waited.values()), "whoever runs may have paused for a moment"
    assert run(backend, live, 3 * LENGTH) == {id_: expected(tiny_model, id_) for id_ in live}
    backend.check_integrity()
    after = run(backend, gone, 3 * LENGTH)
    assert {id_: before[id_] + after[id_] for id_ in gone} == {id_: expected(tiny_model, id_) for id_ in gone}
    assert not backend.has_unfinished()
    assert backend.stats().kv_bytes_reserved == 0


def test_rows_that_are_named_now_and_then_keep_their_room(backend: ContiguousBackend) -> None:
    running, waiting = [RequestId(1), RequestId(2)], [RequestId(3)]
    backend.add([request(id_) for id_ in (*running, *waiting)])
    run(backend, running, 1)
    for _ in range(LENGTH - 2):
        assert run(backend, waiting, MAX_STEPS_IN_VAIN // 2) == {waiting[0]: []}
        assert all(run(backend, running, 1).values())
    backend.abort([*running, *waiting])
