"""Attention by tiles of the cpu kernels, in software where the CPU has none: bits, edges, and refusals."""

import errno
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pagedkv.kernels.cpu import library, provider
from pagedkv.kernels.cpu.attention_choice import AttentionChoice
from pagedkv.kernels.cpu.compiler import build_library
from pagedkv.kernels.cpu.library import TileUse
from pagedkv.kernels.cpu.provider import CpuKernels
from pagedkv.kernels.reference import ReferenceKernels
from pagedkv.plugin.attention_metadata import AttentionMetadata, AttentionOptions
from pagedkv.plugin.interface import AttentionKernels
from pagedkv.plugin.kv_dtypes import KVCacheSpec, find_kv_dtype

CPU_FLAGS = re.search(r"^flags.*$|\Z", Path("/proc/cpuinfo").read_text(), re.MULTILINE).group().split()
SOFTWARE = (
    *(() if "amx_bf16" in CPU_FLAGS else ("-DSOFTWARE_TILES",)),
    *(() if "avx512_bf16" in CPU_FLAGS else ("-DLANES=16", "-DHAS_BF16_DOT=1")),
)
"""The build of the conformance suite."""
NARROW = ("-DSOFTWARE_TILES", "-march=x86-64-v3", "-DHAS_BF16_DOT=1")
"""A tile has more columns than a vector has lanes."""
EVERYWHERE = TileUse.DECODES | TileUse.PROMPTS
NUM_KV_HEADS = 2
PLAIN = AttentionOptions(scale=0.125)
is_x86 = platform.machine() == "x86_64"


def make_kernels(flags: tuple[str, ...] = SOFTWARE, tile_use: TileUse = EVERYWHERE) -> CpuKernels:
    return CpuKernels(torch.device("cpu"), flags, AttentionChoice(tile_use))


@dataclass(frozen=True)
class Batch:
    """Sequences of (context tokens, queries), each with its own blocks; NaN stands behind the last token of each."""

    lengths: Sequence[tuple[int, int]]
    head_dim: int = 64
    v_head_dim: int = 64
    block_size: int = 16
    num_heads: int = 6
    kv_dtype: str = "bf16"
    options: AttentionOptions = PLAIN
    seed: int = 0

    def run(self, kernels: AttentionKernels) -> list[torch.Tensor]:
        """Attention of each sequence: [queries, num_heads, v_head_dim]."""
        size = self.block_size
        counts = [-(-context // size) for context, _ in self.lengths]
        num_tokens, num_queries = sum(counts) * size, [queries for _, queries in self.lengths]
        spec = KVCacheSpec(NUM_KV_HEADS, self.head_dim, self.v_head_dim, size, find_kv_dtype(self.kv_dtype))
        storage = kernels.allocate(spec, sum(counts))
        tables = torch.full((len(counts), max(counts)), -7, dtype=torch.int32)
        keys, values, queries = [], [], []
        for row, (context, count) in enumerate(self.lengths):
            generator = torch.Generator().manual_seed(self.seed + context)
            k = torch.randn(counts[row] * size, NUM_KV_HEADS, self.head_dim, generator=generator)
            v = torch.randn(counts[row] * size, NUM_KV_HEADS, self.v_head_dim, generator=generator)
            if spec.kv_dtype.bits > 8:
                k[context:], v[context:] = float("nan"), float("nan")
            keys.append(k)
            values.append(v)
            queries.append(torch.randn(count, self.num_heads, self.head_dim, generator=generator))
            first = sum(counts[:row])
            tables[row, : counts[row]] = torch.arange(first, first + counts[row])
        stored = make_metadata([num_tokens], [num_tokens], torch.arange(sum(counts), dtype=torch.int32)[None])
        kernels.store(storage, torch.cat(keys).bfloat16(), torch.cat(values).bfloat16(), stored)
        metadata = make_metadata([context for context, _ in self.lengths], num_queries, tables)
        out = kernels.attend(torch.cat(queries).bfloat16(), storage, metadata, self.options)
        return list(out.split(num_queries))


def make_metadata(seq_lens: list[int], num_queries: list[int], tables: torch.Tensor) -> AttentionMetadata:
    return AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, *num_queries]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=tables,
        slot_mapping=torch.arange(sum(num_queries)),
        max_query_len=max(num_queries),
        max_seq_len=max(seq_lens),
        num_decodes=sum(count == 1 for count in num_queries),
    )


LENGTHS = [(1, 1), (700, 1), (33, 1), (16, 1), (40, 40), (131, 7), (300, 170), (64, 2)]


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("flags", [SOFTWARE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_a_sequence_has_the_same_bits_alone(flags: tuple[str, ...], kv_dtype: str, block_size: int) -> None:
    together = Batch(LENGTHS, kv_dtype=kv_dtype, block_size=block_size).run(make_kernels(flags))
    for lengths, out in zip(LENGTHS, together, strict=True):
        assert out.isfinite().all()
        [alone] = Batch([lengths], kv_dtype=kv_dtype, block_size=block_size).run(make_kernels(flags))
        assert torch.equal(alone, out), lengths


def test_a_decode_has_the_same_bits_alone_and_among_33() -> None:
    lengths = [(100 + row, 1) for row in range(33)]
    together = Batch(lengths).run(make_kernels())
    for row in (0, 16, 32):
        assert torch.equal(Batch([lengths[row]]).run(make_kernels())[0], together[row])


@pytest.mark.parametrize("num_heads", [2, 6, 32, 34, 66])
def test_every_number_of_rows_in_a_tile(num_heads: int) -> None:
    """1 to 33 query heads a KV head: one tile of rows, two, more; the last ones not full."""
    compare(Batch([(90, 1), (75, 5)], num_heads=num_heads), SOFTWARE)


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "block_size"), [(32, 16, 16), (48, 80, 32), (64, 64, 8), (80, 48, 128), (128, 96, 16)]
)
@pytest.mark.parametrize("flags", [SOFTWARE, NARROW], ids=["wide", "narrow"])
def test_sizes_that_fill_no_whole_tile(flags: tuple[str, ...], head_dim: int, v_head_dim: int, block_size: int) -> None:
    compare(Batch(LENGTHS, head_dim=head_dim, v_head_dim=v_head_dim, block_size=block_size), flags)


@pytest.mark.parametrize("window", [1, 17, 40, 200])
def test_windows_that_begin_anywhere(window: int) -> None:
    compare(Batch([(300, 1), (700, 1), (300, 290), (161, 30)], options=AttentionOptions(0.125, window)), SOFTWARE)


def test_options_belong_to_each_row() -> None:
    slopes, sinks = torch.linspace(0.01, 0.3, 6), torch.linspace(-1, 2, 6)
    options = AttentionOptions(scale=0.125, softcap=20.0, alibi_slopes=slopes, sinks=sinks)
    compare(Batch(LENGTHS, options=options), SOFTWARE)


def compare(batch: Batch, flags: tuple[str, ...]) -> None:
    """With the reference; one token's NaN behind another's end would show."""
    ours = batch.run(make_kernels(flags))
    theirs = batch.run(ReferenceKernels.create(torch.device("cpu")))
    for lengths, one, other in zip(batch.lengths, ours, theirs, strict=True):
        error = (one.float() - other.float()).square().mean().sqrt()
        assert error <= 0.006 * other.float().square().mean().sqrt(), lengths


def test_tiles_are_used_where_they_are_asked_for() -> None:
    """Their sums have another order than those of vectors, in decodes and in prompts."""
    batch = Batch([*((700 + row, 1) for row in range(9)), (300, 170)])
    *decodes, prompt = batch.run(make_kernels(tile_use=TileUse.NOWHERE))
    for use, is_decode_equal, is_prompt_equal in [
        (TileUse.DECODES, False, True),
        (TileUse.PROMPTS, True, False),
        (EVERYWHERE, False, False),
    ]:
        *other_decodes, other_prompt = batch.run(make_kernels(tile_use=use))
        assert torch.equal(torch.cat(decodes), torch.cat(other_decodes)) is is_decode_equal
        assert torch.equal(prompt, other_prompt) is is_prompt_equal


def test_a_refusal_leaves_vectors(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """That the request itself returns the error is tested with the instructions."""
    batch = Batch([(700, 1), (300, 170)])
    vectors = batch.run(make_kernels(tile_use=TileUse.NOWHERE))
    monkeypatch.setattr(library, "_request_tiles", lambda _: errno.EPERM)
    provider.report_refused_tiles.cache_clear()
    for _ in range(2):
        outputs = batch.run(make_kernels())
    for one, other in zip(outputs, vectors, strict=True):
        assert torch.equal(one, other)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Operation not permitted" in caplog.text


@pytest.mark.skipif(not is_x86, reason="compiles for x86-64")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="reads libraries with objdump")
def test_the_instructions_are_those_of_the_processor() -> None:
    """Compiled for one with tiles, which this one need not be."""
    built = build_library(("-march=sapphirerapids",))
    listing = subprocess.run(["objdump", "-d", built], capture_output=True, text=True, check=True).stdout
    counts = {name: len(re.findall(rf"\s{name}\b", listing)) for name in ("ldtilecfg", "tdpbf16ps", "tilerelease")}
    assert counts["tdpbf16ps"] >= 11
    assert counts["tilerelease"] >= 1
    assert counts["ldtilecfg"] >= 1
