"""The reference kernels beside the conformance suite: how they cut work."""

import pytest
import torch

from pagedkv.kernels import reference
from pagedkv.kernels.reference import ReferenceKernels
from pagedkv.plugin.conformance.attention_oracle import attend_exactly, make_metadata, make_options, make_rows
from pagedkv.plugin.kv_dtypes import FP32
from pagedkv.plugin.model_spec import AttentionSpec


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(4, 2, 32, 32, sliding_window=11),
        AttentionSpec(4, 2, 32, 32, softcap=2.0, has_sinks=True),
        AttentionSpec(4, 2, 32, 32, sliding_window=30, has_alibi=True),
    ],
    ids=["window", "softcap and sinks", "window and alibi"],
)
def test_a_long_prompt_in_chunks_equals_attention_in_one_piece(
    spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_MAX_SCORES", 300)
    generator = torch.Generator().manual_seed(0)
    kernels = ReferenceKernels.create(torch.device("cpu"))
    storage = kernels.allocate(spec.cache_spec(8, FP32), 9)
    rows = make_rows([(0, 70)], 8, 9, generator)
    k, v = torch.randn(2, 70, 2, 32, generator=generator)
    q = torch.randn(70, 4, 32, generator=generator)
    metadata = make_metadata(rows, 8, torch.device("cpu"))
    options = make_options(spec, torch.device("cpu"), generator)
    kernels.store(storage, k, v, metadata)
    out = kernels.attend(q, storage, metadata, options)
    torch.testing.assert_close(out.double(), attend_exactly(q, k, v, options), rtol=1e-5, atol=1e-5)


def test_decodes_are_padded_to_less_than_twice_their_blocks() -> None:
    seq_lens = [1, 4000, 0, 17, 2100, 33, 16, 0]
    groups = reference._group_decodes(seq_lens, 16, None)
    assert sorted(row for group in groups for row in group) == [0, 1, 3, 4, 5, 6]
    for group in groups:
        blocks = [-(-seq_lens[row] // 16) for row in group]
        assert max(blocks) < 2 * min(blocks)


def test_a_window_shortens_what_decodes_gather() -> None:
    assert reference._group_decodes([4096, 16], 16, None) == [[0], [1]]
    assert reference._group_decodes([4096, 16], 16, 16) == [[0, 1]]
