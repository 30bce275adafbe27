"""Chooses, by measuring, what computes attention: own products by vectors or by tiles, or torch's own attention.

The choice depends on a layer's shape and on whether a sequence has one query or more, never on what else is in a batch,
so that a sequence keeps its bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from pagedkv.kernels.cpu.dense_attention import MIN_DENSE_TOKENS, attend_prompt, find_slots
from pagedkv.kernels.cpu.library import AttentionLibrary, TileUse
from pagedkv.kernels.cpu.measured_choice import Seconds, TimingTable, Work, measured_table, time_candidates
from pagedkv.plugin.attention_metadata import AttentionMetadata, AttentionOptions
from pagedkv.plugin.interface import KVStorage
from pagedkv.plugin.kv_dtypes import KVCacheSpec

DECODE_LENGTHS = (128, 1024)
PROMPT_LENGTHS = (MIN_DENSE_TOKENS, 1024)
NUM_DECODES = 4
"""Sequences of a measured decode step."""
MAX_S = 0.08
"""For each of the four cases, so that all take less than half a second."""
TORCH_MARGIN = 1.25
"""torch's attention must win by this factor in every case to be taken: it is measured without a batch around it."""


class StoresTokens(Protocol):
    """What is needed of kernels to fill a storage."""

    def allocate(self, cache_spec: KVCacheSpec, num_blocks: int) -> KVStorage: ...
    def store(self, storage: KVStorage, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> None: ...
    def read(self, storage: KVStorage, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the time of a layer's attention depends on."""

    num_heads: int
    cache_spec: KVCacheSpec
    dtype: torch.dtype
    """Of queries."""

    def __str__(self) -> str:
        spec = self.cache_spec
        dims = f"{spec.head_dim}" if spec.head_dim == spec.v_head_dim else f"{spec.head_dim} and {spec.v_head_dim}"
        return (
            f"attention, {self.num_heads} query and {spec.num_kv_heads} KV heads of {dims}, "
            f"blocks of {spec.block_size}, KV {spec.kv_dtype.name}, queries {str(self.dtype).removeprefix('torch.')}"
        )


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """What is used for a shape."""

    tile_use: TileUse = TileUse.NOWHERE
    uses_torch: bool = False
    """Whether whole prompts of `MIN_DENSE_TOKENS` and more go to torch's attention."""


def measure_attention(kernels: StoresTokens, library: AttentionLibrary, shape: AttentionShape) -> AttentionChoice:
    """Times the candidates for a shape, or reads what they took before, and chooses.

    Products by tiles are candidates where `library.tiles_error` is 0.
    """
    has_tiles = library.tiles_error == 0
    title = f"{shape}, with tiles" if has_tiles else str(shape)
    return choose_attention(measured_table(title, lambda: _Trial(kernels, library, shape).run()))


def choose_attention(table: TimingTable) -> AttentionChoice:
    """The fastest for decodes and for prompts, of a table with the cases of a measurement."""
    use = TileUse.NOWHERE
    for flag, kind in ((TileUse.DECODES, "decode"), (TileUse.PROMPTS, "prompt")):
        cases = {case: seconds for case, seconds in table.cases.items() if case.startswith(kind)}
        has_tiles = all("tiles" in seconds for seconds in cases.values())
        if has_tiles and TimingTable(kind, cases).mean_ratio("tiles", "vectors") < 1:
            use |= flag
    prompts = [seconds for case, seconds in table.cases.items() if case.startswith("prompt")]
    return AttentionChoice(use, all(_is_torch_faster(seconds) for seconds in prompts))


def _is_torch_faster(seconds: Seconds) -> bool:
    own = min(value for name, value in seconds.items() if name != "torch")
    return seconds["torch"] * TORCH_MARGIN < own


class _Trial:
    """A storage of random tokens and queries. Few heads stand for many: work is the same for each KV head."""

    def __init__(self, kernels: StoresTokens, library: AttentionLibrary, shape: AttentionShape) -> None:
        spec = shape.cache_spec
        self._kernels, self._library = kernels, library
        self._generator = torch.Generator().manual_seed(0)
        num_kv_heads = min(spec.num_kv_heads, torch.get_num_threads())
        self._num_heads = shape.num_heads // spec.num_kv_heads * num_kv_heads
        self._spec, self._dtype = replace(spec, num_kv_heads=num_kv_heads), shape.dtype
        self._num_tokens = NUM_DECODES * max(DECODE_LENGTHS)
        self._num_blocks = self._num_tokens // spec.block_size
        self._table = torch.randperm(self._num_blocks, generator=self._generator).int()[None]
        self._storage = self._fill()
        self._options = AttentionOptions(scale=spec.head_dim**-0.5)

    def run(self) -> dict[str, Seconds]:
        """Times all cases."""
        decodes = {f"decode of {length} tokens": self._decode(length) for length in DECODE_LENGTHS}
        prompts = {f"prompt of {length} tokens": self._prompt(length) for length in PROMPT_LENGTHS}
        return {case: time_candidates(candidates, MAX_S) for case, candidates in (decodes | prompts).items()}

    def _fill(self) -> KVStorage:
        storage = self._kernels.allocate(self._spec, self._num_blocks)
        if self._spec.kv_dtype.has_static_scales:
            storage = replace(storage, static_scales=(torch.ones(self._spec.num_kv_heads),) * 2)
        k, v = (
            self._random(self._num_tokens, self._spec.num_kv_heads, dim)
            for dim in (self._spec.head_dim, self._spec.v_head_dim)
        )
        self._kernels.store(storage, k, v, self._metadata([self._num_tokens], [self._num_tokens], self._table))
        return storage

    def _decode(self, length: int) -> dict[str, Work]:
        tables = self._table.view(NUM_DECODES, -1)
        return self._own_candidates(self._metadata([length] * NUM_DECODES, [1] * NUM_DECODES, tables))

    def _prompt(self, length: int) -> dict[str, Work]:
        metadata = self._metadata([length], [length], self._table)
        q = self._random(length, self._num_heads, self._spec.head_dim)
        return self._own_candidates(metadata) | {"torch": partial(self._attend_by_torch, q, metadata, length)}

    def _own_candidates(self, metadata: AttentionMetadata) -> dict[str, Work]:
        q = self._random(int(metadata.cu_seqlens_q[-1]), self._num_heads, self._spec.head_dim)
        out = q.new_empty(q.shape[0], q.shape[1], self._spec.v_head_dim)
        attend: Callable[[TileUse], None] = partial(
            self._library.attend, q, out, self._storage, metadata, self._options
        )
        candidates: dict[str, Work] = {"vectors": partial(attend, TileUse.NOWHERE)}
        if self._library.tiles_error == 0:
            candidates["tiles"] = partial(attend, TileUse.DECODES | TileUse.PROMPTS)
        return candidates

    def _attend_by_torch(self, q: torch.Tensor, metadata: AttentionMetadata, length: int) -> torch.Tensor:
        k, v = self._kernels.read(self._storage, find_slots(metadata, 0, length, self._spec.block_size))
        return attend_prompt(q, k, v, self._options.scale)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._dtype)

    @staticmethod
    def _metadata(seq_lens: list[int], query_lens: list[int], tables: torch.Tensor) -> AttentionMetadata:
        return AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=tables,
            slot_mapping=torch.arange(sum(query_lens)),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            num_decodes=sum(count == 1 for count in query_lens),
        )
