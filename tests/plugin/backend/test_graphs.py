"""Padded decode steps: the code that CUDA graphs replay, here with an ordinary forward."""

from __future__ import annotations

from typing import Any

import pytest

from pagedkv.plugin.attention_metadata import PADDING_SLOT
from pagedkv.plugin.backend.graphs import PaddedDecodes
from pagedkv.plugin.backend.paged import PagedBackend
from pagedkv.plugin.conformance.token_model import TokenModel
from pagedkv.plugin.requests import Request, RequestId, SamplingParams


@pytest.fixture
def padded_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The padded size of every decode step that ran from the fixed buffers."""
    sizes: list[int] = []
    run = PaddedDecodes._run
    monkeypatch.setattr(PaddedDecodes, "_run", lambda self, size: sizes.append(size) or run(self, size))
    return sizes


def enable(backend: PagedBackend, batch_sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> PaddedDecodes:
    monkeypatch.setattr(type(backend._kernels), "can_capture_graphs", True)
    backend._executor.prepare_decodes(batch_sizes, 512)
    decodes = backend._executor._padded_decodes
    assert decodes is not None
    return decodes


def test_padded_decodes_give_the_plain_output_and_larger_batches_run_without(
    make_backend: Any, token_model: TokenModel, padded_sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend()
    enable(backend, (8, 1, 4), monkeypatch)
    lengths = [5 + 2 * i for i in range(10)]
    backend.add(
        [
            Request(RequestId(i), [1 + i] * 20, SamplingParams(max_new_tokens=n, ignore_eos=True))
            for i, n in enumerate(lengths)
        ]
    )
    tokens: dict[int, list[int]] = {i: [] for i in range(10)}
    while backend.has_unfinished():
        for output in backend.step():
            tokens[output.request_id].append(output.token.token_id)
    assert set(padded_sizes) == {1, 4, 8}
    assert len(padded_sizes) < max(lengths) - 1, "ten rows are more than the largest size"
    for i, n in enumerate(lengths):
        assert tokens[i] == token_model.continue_greedily([1 + i] * 20, n)


@pytest.mark.parametrize("poison", ["block table", "everything"])
def test_real_rows_do_not_depend_on_what_padding_rows_hold(
    make_backend: Any, token_model: TokenModel, monkeypatch: pytest.MonkeyPatch, poison: str
) -> None:
    backend = make_backend()
    buffers = enable(backend, (8,), monkeypatch)._buffers
    fill = type(buffers).fill

    def fill_and_poison(self: Any, step_input: Any, size: int) -> None:
        self.block_table.fill_(2**30)
        if poison == "everything":
            self.token_ids.fill_(96)
            self.positions.fill_(400)
            self.slot_mapping.fill_(0)
            self.seq_lens.fill_(500)
        fill(self, step_input, size)

    monkeypatch.setattr(type(buffers), "fill", fill_and_poison)
    backend.add([Request(RequestId(0), [7] * 40, SamplingParams(max_new_tokens=9, ignore_eos=True))])
    tokens = []
    while backend.has_unfinished():
        tokens += [output.token.token_id for output in backend.step()]
    assert tokens == token_model.continue_greedily([7] * 40, 9)
    assert buffers.slot_mapping[1:].tolist() == [PADDING_SLOT] * 7
    assert buffers.seq_lens[1:].tolist() == [0] * 7


def test_prompts_and_prompt_logprobs_do_not_run_from_the_buffers(
    make_backend: Any, padded_sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend()
    enable(backend, (4,), monkeypatch)
    params = SamplingParams(max_new_tokens=1, prefill_logprobs=True)
    backend.add([Request(RequestId(0), [1, 2, 3], params), Request(RequestId(1), [4, 5], params)])
    assert len(backend.step()) == 2
    assert padded_sizes == []


def test_new_pool_drops_what_was_captured_over_the_old_one(make_backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend()
    enable(backend, (4,), monkeypatch)
    backend._executor.allocate(16)
    assert backend._executor._padded_decodes is None
