"""4 bits in the triton kernels: blocks are those of `reference`, however tokens come, and attention reads them.

Without a GPU these tests are run by `test_triton_interpreter.py`.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pagedkv.kernels.reference import ReferenceKernels
from pagedkv.kernels.triton.launch import is_interpreted, run_on
from pagedkv.kernels.triton.provider import TritonKernels
from pagedkv.kernels.triton.store_int4 import plan_rotate
from pagedkv.plugin.attention_metadata import AttentionMetadata
from pagedkv.plugin.conformance.attention_oracle import Row, make_metadata
from pagedkv.plugin.interface import AttentionKernels, KVStorage
from pagedkv.plugin.kv_dtypes import INT4
from pagedkv.plugin.model_spec import AttentionSpec
from pagedkv.plugin.step_plan import BlockCopy, BlockId

pytestmark = pytest.mark.skipif(
    not is_interpreted() and not torch.cuda.is_available(),
    reason="run by test_triton_interpreter.py, in a process of its own",
)
DEVICE = torch.device("cpu") if is_interpreted() else torch.device("cuda", 0)
BLOCK_SIZE = 8
STEPS = {
    "at once": [(0, 13)],
    "token by token": [(at, at + 1) for at in range(13)],
    "chunks": [(0, 3), (3, 8), (8, 13)],
}
"""First and last token of each call."""


def _metadata(slots: list[int]) -> AttentionMetadata:
    """What `store` reads of it."""
    plain = make_metadata([Row(0, len(slots), torch.arange(len(slots)))], BLOCK_SIZE, DEVICE)
    plain.slot_mapping.copy_(torch.tensor(slots))
    return plain


def _slots(table: list[int], first: int, last: int) -> list[int]:
    return [table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(first, last)]


def _fill(kernels: AttentionKernels, spec: AttentionSpec, steps: list[tuple[int, int]]) -> KVStorage:
    """Two sequences of 13 tokens in blocks that others have used, a padding row between them."""
    generator = torch.Generator().manual_seed(3)
    storage = kernels.allocate(spec.cache_spec(BLOCK_SIZE, INT4), 6)
    for tensor in storage.tensors.values():
        tensor.copy_(torch.randint(-128, 127, tensor.shape, generator=generator).to(tensor.dtype))
    shapes = [(2, 13, spec.num_kv_heads, dim) for dim in (spec.head_dim, spec.v_head_dim)]
    k, v = ((torch.randn(shape, generator=generator) * 3 + 1).to(DEVICE) for shape in shapes)
    k[..., 5] *= 30
    for first, last in steps:
        slots = [*_slots([4, 0], first, last), -1, *_slots([1, 5], first, last)]
        rows = [torch.cat([x[0, first:last], x[0, :1], x[1, first:last]]) for x in (k, v)]
        kernels.store(storage, rows[0], rows[1], _metadata(slots))
    return storage


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("dims", [(80, 96), (64, 128)], ids=str)
def test_blocks_hold_what_those_of_reference_hold(steps: list[tuple[int, int]], dims: tuple[int, int]) -> None:
    spec = AttentionSpec(2, 2, *dims)
    slots = torch.tensor(_slots([4, 0], 0, 13) + _slots([1, 5], 0, 13), device=DEVICE)
    numbers = [
        kernels.read(_fill(kernels, spec, steps), slots)
        for kernels in (TritonKernels.create(DEVICE), ReferenceKernels.create(DEVICE))
    ]
    for ours, theirs in zip(*numbers, strict=True):
        # Logarithms and powers may be rounded otherwise, so that here and there a channel of a block has another scale.
        assert ((ours - theirs).abs() <= 1e-4 * theirs.abs() + 1e-5).float().mean() > 0.995
        assert (ours - theirs).norm() <= 0.01 * theirs.norm()


@pytest.mark.parametrize("dim", [16, 80, 96, 256])
def test_rotated_twice_is_as_before(dim: int) -> None:
    x = torch.randn(5, 3, dim, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    once, twice = torch.empty_like(x), torch.empty_like(x)
    run_on(DEVICE, plan_rotate(x, once), plan_rotate(once, twice))
    assert not torch.allclose(once, x, atol=0.1)
    torch.testing.assert_close(twice, x)
    torch.testing.assert_close(once.norm(dim=-1), x.norm(dim=-1))


def test_blocks_are_copied_whose_bytes_are_no_multiple_of_four() -> None:
    kernels = TritonKernels.create(DEVICE)
    storage = kernels.allocate(AttentionSpec(3, 3, 24, 24).cache_spec(BLOCK_SIZE, INT4), 3)
    first = storage.tensors["k_first"]
    assert first[0].numel() == 18
    first.copy_(torch.arange(first.numel()).view(first.shape))
    expected = first.clone()
    expected[2] = first[1]
    kernels.copy_blocks(storage, [BlockCopy(BlockId(1), BlockId(2))])
    assert torch.equal(first, expected)


def test_blocks_of_other_sizes_are_refused_with_the_reason() -> None:
    spec = AttentionSpec(2, 2, 64, 64)
    reasons = TritonKernels.create(DEVICE).unsupported_reasons(spec, spec.cache_spec(24, INT4), torch.float16)
    assert reasons == ["4 bits need blocks of a power of two tokens, not 24"]
