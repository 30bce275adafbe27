"""Parts of the suite for attention kernels: sizes, random paged batches, and the check against the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import ClassVar

import numpy as np
import pytest
import torch

from pagedkv.plugin.attention_metadata import AttentionOptions
from pagedkv.plugin.conformance.attention_oracle import (
    Row,
    attend_as_torch,
    attend_exactly,
    count_blocks,
    make_metadata,
    make_options,
    make_rows,
    store_tokens,
)
from pagedkv.plugin.interface import AttentionKernels, KVStorage
from pagedkv.plugin.kv_dtypes import KV_DTYPE_OF_TORCH, KVCacheSpec, ScaleGranularity, find_kv_dtype, known_kv_dtypes
from pagedkv.plugin.model_spec import AttentionSpec
from pagedkv.plugin.registry import KERNELS, load_plugin
from pagedkv.plugin.step_plan import BlockCopy, BlockId

Lengths = Sequence[tuple[int, int]]
"""(num_cached_tokens, num_new_tokens) of each row."""


FEATURES: dict[str, Callable[[AttentionSpec], AttentionSpec]] = {
    "window": lambda spec: replace(spec, sliding_window=19),
    "window of one": lambda spec: replace(spec, sliding_window=1),
    "softcap": lambda spec: replace(spec, softcap=2.0),
    "sinks": lambda spec: replace(spec, has_sinks=True),
    "alibi": lambda spec: replace(spec, has_alibi=True),
    "window and sinks": lambda spec: replace(spec, sliding_window=40, has_sinks=True),
    "window and softcap": lambda spec: replace(spec, sliding_window=33, softcap=3.0),
    "all": lambda spec: replace(spec, sliding_window=50, softcap=3.0, has_sinks=True, has_alibi=True),
    "narrow values": lambda spec: replace(spec, v_head_dim=32),
    "wide values": lambda spec: replace(spec, v_head_dim=128),
}
"""Features of layers by name, as changes to a plain spec."""

POISONS = {
    f"{value} in {where}": (float(value) if "k" in where else None, float(value) if "v" in where else None)
    for value, where in product(("nan", "inf", "-inf"), ("k", "v", "k and v"))
}
"""Fill values (of keys, of values) by name; None leaves finite values."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Sizes of the tests."""

    max_context_tokens: int
    head_dims: tuple[int, ...]
    group_sizes: tuple[int, ...]
    """Query heads per KV head."""
    block_sizes: tuple[int, ...]
    num_random_batches: int
    has_large_offsets: bool
    features: tuple[str, ...] = tuple(FEATURES)
    poisons: tuple[str, ...] = tuple(POISONS)


FULL = Profile(
    max_context_tokens=4090,
    head_dims=(32, 64, 80, 96, 128, 256),
    group_sizes=(1, 2, 3, 4, 7, 8, 16),
    block_sizes=(8, 16, 32, 64, 128, 256),
    num_random_batches=40,
    has_large_offsets=True,
)
REDUCED = Profile(
    max_context_tokens=90,
    head_dims=(32, 80),
    group_sizes=(1, 3, 16),
    block_sizes=(8, 16, 64),
    num_random_batches=5,
    has_large_offsets=False,
    features=("window", "sinks", "all", "narrow values", "wide values"),
    poisons=("nan in k", "nan in v", "inf in k and v", "-inf in k and v"),
)


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Rows with stored tokens, and the queries of their new tokens."""

    storage: KVStorage
    rows: list[Row]
    q: torch.Tensor
    """[num_tokens, num_heads, head_dim]"""
    k: torch.Tensor
    """[sum of seq_len, num_kv_heads, head_dim]: of whole sequences, row by row."""
    v: torch.Tensor
    options: AttentionOptions


class KernelsHarness:
    """Base of the suite."""

    kernels_name: ClassVar[str]
    device: ClassVar[torch.device] = torch.device("cpu")
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    profile: ClassVar[Profile] = FULL

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrizes the tests from the subclass's attributes."""
        names = known_kv_dtypes()
        own = [(dtype, KV_DTYPE_OF_TORCH[dtype].name) for dtype in self.dtypes]
        quantized = [(self.dtypes[-1], name) for name in names if find_kv_dtype(name).is_quantized]
        values = {
            "any_kv_dtype": [(self.dtypes[0], name) for name in names],
            "static_kv_dtype": [(self.dtypes[0], name) for name in names if find_kv_dtype(name).has_static_scales],
            "far_kv_dtype": [(self.dtypes[0], name) for name in names if self.profile.has_large_offsets],
            "any_precision": list(product(self.dtypes, names)),
            "precision": own + quantized,
            "head_dim": self.profile.head_dims,
            "group_size": self.profile.group_sizes,
            "block_size": self.profile.block_sizes,
            "feature": self.profile.features,
            "poison": self.profile.poisons,
        }
        for argument, choices in values.items():
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, choices, ids=_name_choice)

    @pytest.fixture
    def kernels(self) -> AttentionKernels:
        return _find_kernels(self.kernels_name).create(self.device)

    def _cache_spec(
        self, kernels: AttentionKernels, spec: AttentionSpec, block_size: int, dtype: torch.dtype, kv_dtype_name: str
    ) -> KVCacheSpec:
        cache_spec = spec.cache_spec(block_size, find_kv_dtype(kv_dtype_name))
        reasons = kernels.unsupported_reasons(spec, cache_spec, dtype)
        if reasons:
            pytest.skip("; ".join(reasons))
        return cache_spec

    def _batch(
        self,
        kernels: AttentionKernels,
        spec: AttentionSpec,
        block_size: int,
        precision: tuple[torch.dtype, str],
        lengths: Lengths,
        *,
        num_spare_blocks: int = 2,
        poison: tuple[float | None, float | None] | None = None,
        static_factor: float = 1.0,
        seed: int = 0,
    ) -> PagedBatch:
        """Stores random tokens in blocks filled with zeros, or with `poison` (of keys, of values).

        Storage, slots, tokens and queries depend only on the other arguments, so that two calls make equal batches.
        """
        dtype, name = precision
        cache_spec = self._cache_spec(kernels, spec, block_size, dtype, name)
        generator = torch.Generator().manual_seed(seed)
        num_blocks = count_blocks(lengths, block_size) + num_spare_blocks
        storage = replace(
            kernels.allocate(cache_spec, num_blocks), static_scales=self._static_scales(cache_spec, static_factor)
        )
        if poison is not None:
            all_slots = Row(0, num_blocks * block_size, torch.arange(num_blocks))
            k, v = (
                torch.full((all_slots.seq_len, spec.num_kv_heads, dim), 0.5 if value is None else value, dtype=dtype)
                for value, dim in zip(poison, (spec.head_dim, spec.v_head_dim), strict=True)
            )
            store_tokens(kernels, storage, [all_slots], k.to(self.device), v.to(self.device))
        rows = make_rows(lengths, block_size, num_blocks, generator)
        return self._fill(kernels, spec, storage, rows, dtype, generator)

    def _fill(
        self,
        kernels: AttentionKernels,
        spec: AttentionSpec,
        storage: KVStorage,
        rows: list[Row],
        dtype: torch.dtype,
        generator: torch.Generator,
    ) -> PagedBatch:
        num_stored, num_new = sum(row.seq_len for row in rows), sum(row.num_queries for row in rows)
        shapes = (
            (num_new, spec.num_heads, spec.head_dim),
            (num_stored, spec.num_kv_heads, spec.head_dim),
            (num_stored, spec.num_kv_heads, spec.v_head_dim),
        )
        q, k, v = (torch.randn(shape, generator=generator).to(self.device, dtype) for shape in shapes)
        store_tokens(kernels, storage, rows, k, v)
        return PagedBatch(storage, rows, q, k, v, make_options(spec, self.device, generator))

    def _attend(self, kernels: AttentionKernels, batch: PagedBatch) -> torch.Tensor:
        metadata = make_metadata(batch.rows, batch.storage.spec.block_size, self.device)
        return kernels.attend(batch.q, batch.storage, metadata, batch.options)

    def _check(self, kernels: AttentionKernels, batch: PagedBatch) -> None:
        """Compares the kernels' output with dense attention over what they stored."""
        out = self._attend(kernels, batch)
        assert out.shape == (*batch.q.shape[:2], batch.storage.spec.v_head_dim)
        assert out.dtype == batch.q.dtype
        exact, as_torch = [], []
        for row, q in zip(batch.rows, torch.split(batch.q, [row.num_queries for row in batch.rows]), strict=True):
            k, v = kernels.read(batch.storage, row.slots(batch.storage.spec.block_size).to(self.device))
            exact.append(attend_exactly(q, k, v, batch.options))
            as_torch.append(attend_as_torch(q, k, v, batch.options, q.dtype))
        expected = torch.cat(exact)
        error, torch_error = out.double() - expected, torch.cat(as_torch).double() - expected
        eps = torch.finfo(out.dtype).eps
        for measure, factor in ((_root_mean_square, 2), (_largest, 4)):
            bound = factor * measure(torch_error) + eps * measure(expected)
            assert measure(error) <= bound, (
                f"the error ({measure.__name__.strip('_')}) is {measure(error):.2e}, "
                f"torch's own {measure(torch_error):.2e}, allowed {bound:.2e}"
            )

    def _slots(self, batch: PagedBatch) -> torch.Tensor:
        return torch.cat([row.slots(batch.storage.spec.block_size) for row in batch.rows]).to(self.device)

    def _read_blocks(
        self, kernels: AttentionKernels, storage: KVStorage, blocks: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of blocks: [len(blocks), block_size, num_kv_heads, dim]."""
        block_size = storage.spec.block_size
        slots = torch.tensor(list(blocks))[:, None] * block_size + torch.arange(block_size)
        k, v = kernels.read(storage, slots.flatten().to(self.device))
        return k.view(-1, block_size, *k.shape[1:]), v.view(-1, block_size, *v.shape[1:])

    def _static_scales(self, cache_spec: KVCacheSpec, factor: float) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Static scales for KV dtypes that need them: a different one for each head, for keys and for values."""
        kv_dtype = cache_spec.kv_dtype
        if ScaleGranularity.STATIC not in (kv_dtype.key_scales, kv_dtype.value_scales):
            return None
        is_float = kv_dtype.storage.is_floating_point
        largest = torch.finfo(kv_dtype.storage).max if is_float else 2.0 ** (kv_dtype.bits - 1) - 1
        heads = torch.arange(1, cache_spec.num_kv_heads + 1, dtype=torch.float32, device=self.device)
        return factor * (5 + heads / 4) / largest, factor * (6 + heads / 2) / largest

    def _lazy_zeros(self, num_blocks: int, like: torch.Tensor) -> torch.Tensor:
        """Zeros of which a CPU maps only the pages in use. Skips the test if there is not enough memory."""
        shape = (num_blocks, *like.shape[1:])
        if self.device.type == "cpu":
            try:
                raw = np.zeros(num_blocks * like[0].nbytes, dtype=np.uint8)
            except MemoryError:
                pytest.skip(f"the system does not map {num_blocks * like[0].nbytes} bytes")
            return torch.from_numpy(raw).view(like.dtype).view(shape)
        try:
            return torch.zeros(shape, dtype=like.dtype, device=self.device)
        except torch.OutOfMemoryError:
            pytest.skip(f"the device does not hold {num_blocks * like[0].nbytes} bytes more")


def _root_mean_square(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def _largest(x: torch.Tensor) -> float:
    return x.abs().max().item()


@cache
def _find_kernels(name: str) -> type[AttentionKernels]:
    """Loads kernels by name; cached, because there are some thousand tests."""
    return load_plugin(KERNELS, name)


def make_spec(head_dim: int, *, group_size: int = 3, num_kv_heads: int = 3) -> AttentionSpec:
    """A layer without features; `group_size` query heads share a KV head."""
    return AttentionSpec(group_size * num_kv_heads, num_kv_heads, head_dim, head_dim)


def make_copies(sources: Sequence[int], targets: Sequence[int]) -> list[BlockCopy]:
    """Copies of block sources[i] to targets[i]."""
    return [BlockCopy(BlockId(source), BlockId(target)) for source, target in zip(sources, targets, strict=True)]


def has_same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares bit by bit, so that equal NaN are equal."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _name_choice(choice: object) -> str:
    if isinstance(choice, tuple):
        dtype, kv_dtype_name = choice
        return f"{str(dtype).removeprefix('torch.')}-{kv_dtype_name}"
    return str(choice).replace(" ", "_")
