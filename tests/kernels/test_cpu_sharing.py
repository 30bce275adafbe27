"""Decodes that share blocks of their contexts: read once by the cpu kernels, to the same bits as each of them alone."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from pagedkv.kernels.cpu.attention_choice import AttentionChoice
from pagedkv.kernels.cpu.library import TileUse
from pagedkv.kernels.cpu.provider import CpuKernels
from pagedkv.plugin.attention_metadata import AttentionMetadata, AttentionOptions
from pagedkv.plugin.interface import KVStorage
from pagedkv.plugin.kv_dtypes import KVCacheSpec, find_kv_dtype

NUM_KV_HEADS, HEAD_DIM = 2, 64
PLAIN = AttentionOptions(scale=0.125)
SHARED_TOKENS = 1040
"""More than two of the pieces that contexts are split into."""
SEQ_LENS = (1100, 1041, 1540, 1041, 700, 1300, 1041, 1100, 2000, 1200, 1041)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Where threads are many, so few items are not joined."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def decode(seq_lens: list[int], block_table: torch.Tensor) -> AttentionMetadata:
    return AttentionMetadata(
        cu_seqlens_q=torch.arange(len(seq_lens) + 1, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=block_table,
        slot_mapping=torch.full((len(seq_lens),), -1),
        max_query_len=1,
        max_seq_len=max(seq_lens),
        num_decodes=len(seq_lens),
    )


def make_tables(block_size: int) -> tuple[torch.Tensor, int]:
    """Block tables of SEQ_LENS behind one prefix, of which the sixth sequence has but half. Also how many blocks."""
    shared = SHARED_TOKENS // block_size
    tables = torch.full((len(SEQ_LENS), max(SEQ_LENS) // block_size + 1), -7, dtype=torch.int32)
    num_blocks = shared
    for row, seq_len in enumerate(SEQ_LENS):
        common, count = min(shared, -(-seq_len // block_size)), -(-seq_len // block_size)
        common = common // 2 + 5 if row == 5 else common
        tables[row, :common] = torch.arange(common)
        tables[row, common:count] = torch.arange(num_blocks, num_blocks + count - common)
        num_blocks += count - common
    return tables, num_blocks


def fill(
    kernels: CpuKernels, name: str, block_size: int, dtype: torch.dtype, v_dim: int
) -> tuple[KVStorage, torch.Tensor]:
    """Storage of random keys and values, the slots behind each sequence's end full of NaN where its dtype has one."""
    tables, num_blocks = make_tables(block_size)
    generator = torch.Generator().manual_seed(0)
    storage = kernels.allocate(KVCacheSpec(NUM_KV_HEADS, HEAD_DIM, v_dim, block_size, find_kv_dtype(name)), num_blocks)
    scales = (torch.full((NUM_KV_HEADS,), 0.03), torch.full((NUM_KV_HEADS,), 0.04))
    storage = replace(storage, static_scales=scales if storage.spec.kv_dtype.has_static_scales else None)
    num_tokens = num_blocks * block_size
    k = torch.randn(num_tokens, NUM_KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
    v = torch.randn(num_tokens, NUM_KV_HEADS, v_dim, generator=generator).to(dtype)
    for row, seq_len in enumerate(SEQ_LENS):
        first = int(tables[row, seq_len // block_size]) * block_size
        if seq_len % block_size and first >= SHARED_TOKENS and storage.spec.kv_dtype.bits > 8:
            k[first + seq_len % block_size : first + block_size] = float("nan")
            v[first + seq_len % block_size : first + block_size] = float("nan")
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
        slot_mapping=torch.arange(num_tokens),
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
        num_decodes=0,
    )
    kernels.store(storage, k, v, metadata)
    return storage, tables


def check(
    name: str,
    dtype: torch.dtype = torch.bfloat16,
    options: AttentionOptions = PLAIN,
    num_heads: int = 6,
    block_size: int = 16,
    v_dim: int = 64,
    kernels: CpuKernels | None = None,
) -> None:
    """A batch's rows are those of its sequences alone, where nothing is shared."""
    kernels = kernels or CpuKernels.create(torch.device("cpu"))
    storage, tables = fill(kernels, name, block_size, dtype, v_dim)
    q = torch.randn(len(SEQ_LENS), num_heads, HEAD_DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    together = kernels.attend(q, storage, decode(list(SEQ_LENS), tables), options)
    assert together.isfinite().all()
    assert not torch.equal(together[1], together[3])  # the same context, another query
    for row, seq_len in enumerate(SEQ_LENS):
        alone = kernels.attend(q[row : row + 1], storage, decode([seq_len], tables[row : row + 1]), options)
        assert torch.equal(together[row], alone[0]), f"sequence {row} of {seq_len} tokens"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "int8", "int8_static", "fp8_e4m3", "fp8_e5m2_static", "int4"])
def test_bits_are_those_of_a_sequence_alone(name: str, dtype: torch.dtype) -> None:
    check(name, dtype)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(
    ("num_heads", "block_size", "v_dim"),
    [(2, 16, 64), (4, 8, 64), (10, 16, 80), (14, 128, 48), (24, 16, 16), (26, 16, 64)],
)
def test_every_shape_of_register_tiles(name: str, num_heads: int, block_size: int, v_dim: int) -> None:
    """Also groups of one row, which add in another order than more rows do."""
    check(name, num_heads=num_heads, block_size=block_size, v_dim=v_dim)


@pytest.mark.parametrize("window", [40, 513, 600, 1100, 5000])
def test_windows_begin_elsewhere_in_every_sequence(window: int) -> None:
    check("bf16", options=AttentionOptions(scale=0.125, sliding_window=window))


def test_other_options_belong_to_each_row() -> None:
    slopes, sinks = torch.linspace(0.01, 0.3, 6), torch.linspace(-1, 2, 6)
    check("bf16", options=AttentionOptions(scale=0.125, softcap=20.0, alibi_slopes=slopes, sinks=sinks))


@pytest.mark.parametrize("name", ["bf16", "int4"])
@pytest.mark.parametrize("num_heads", [6, 14])
def test_bits_by_tiles_are_those_of_a_sequence_alone(name: str, num_heads: int) -> None:
    flags = ("-DSOFTWARE_TILES", "-march=x86-64-v3", "-DHAS_BF16_DOT=1")
    check(name, num_heads=num_heads, kernels=CpuKernels(torch.device("cpu"), flags, AttentionChoice(TileUse.DECODES)))
