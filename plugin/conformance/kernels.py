"""What every `AttentionKernels` plugin must do, as a pytest suite that is run by the plugin's registered name.

A plugin author's test file:

    import torch
    from pagedkv.plugin.conformance.kernels import REDUCED, KernelsConformance

    class TestMyKernels(KernelsConformance):
        kernels_name = "mine"                          # as in [project.entry-points."pagedkv.kernels"]
        device = torch.device("cuda")                  # default: the CPU
        dtypes = (torch.float16, torch.bfloat16)       # of queries; default: float32, bfloat16, float16
        profile = REDUCED                              # smaller sizes, for slow devices; default: FULL

pytest runs it as any test class; `pytest` and `hypothesis` must be installed. Each test is run for the KV dtypes that
are registered and skipped where the plugin's `unsupported_reasons` refuses, with its reasons.

Values are held against float64 dense attention over what `read` returns. The error, as a root mean square, may be twice
that of torch's own attention in the dtype of the queries, plus one unit in the last place. The largest single error,
which is an accident of a few roundings, may be four times torch's largest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
from pagedkv.plugin.registry import KERNELS, find_plugin
from pagedkv.plugin.step_plan import BlockCopy, BlockId

Lengths = Sequence[tuple[int, int]]
"""(num_cached_tokens, num_new_tokens) of each row."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Sizes of a run."""

    max_context_tokens: int
    head_dims: tuple[int, ...]
    group_sizes: tuple[int, ...]
    """Query heads a KV head."""
    block_sizes: tuple[int, ...]
    num_random_batches: int
    has_large_offsets: bool


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
)

_FEATURES: dict[str, Callable[[AttentionSpec], AttentionSpec]] = {
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

_POISONS = {
    f"{value} in {where}": (float(value) if "k" in where else None, float(value) if "v" in where else None)
    for value, where in product(("nan", "inf", "-inf"), ("k", "v", "k and v"))
}


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Rows of stored tokens and the queries of their new ones."""

    storage: KVStorage
    rows: list[Row]
    q: torch.Tensor
    """[num_tokens, num_heads, head_dim]"""
    k: torch.Tensor
    """[sum of seq_len, num_kv_heads, head_dim]: of whole sequences, row by row."""
    v: torch.Tensor
    options: AttentionOptions


class KernelsConformance:
    """The suite. Subclass it and set what the module's docstring shows."""

    kernels_name: ClassVar[str]
    device: ClassVar[torch.device] = torch.device("cpu")
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    profile: ClassVar[Profile] = FULL

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Fills the tests' parameters from what the subclass says."""
        names = known_kv_dtypes()
        own = [(dtype, KV_DTYPE_OF_TORCH[dtype].name) for dtype in self.dtypes]
        quantized = [(self.dtypes[-1], name) for name in names if find_kv_dtype(name).is_quantized]
        values = {
            "any_kv_dtype": [(self.dtypes[0], name) for name in names],
            "any_precision": list(product(self.dtypes, names)),
            "precision": own + quantized,
            "head_dim": self.profile.head_dims,
            "group_size": self.profile.group_sizes,
            "block_size": self.profile.block_sizes,
            "feature": list(_FEATURES),
            "poison": list(_POISONS),
        }
        for argument, choices in values.items():
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, choices, ids=_name_choice)

    @pytest.fixture
    def kernels(self) -> AttentionKernels:
        return _find_kernels(self.kernels_name).create(self.device)

    # Storage

    def test_storage_takes_the_bytes_that_the_spec_counts(
        self, kernels: AttentionKernels, any_kv_dtype: tuple[torch.dtype, str], block_size: int
    ) -> None:
        dtype, name = any_kv_dtype
        spec = AttentionSpec(num_heads=6, num_kv_heads=3, head_dim=80, v_head_dim=64)
        cache_spec = self._cache_spec(kernels, spec, block_size, dtype, name)
        storage = kernels.allocate(cache_spec, 5)
        assert storage.num_bytes == 5 * cache_spec.bytes_per_block
        assert {tensor.shape[0] for tensor in storage.tensors.values()} == {5}
        assert {tensor.device.type for tensor in storage.tensors.values()} == {self.device.type}
        assert not any(tensor.view(torch.uint8).any() for tensor in storage.tensors.values())

    def test_read_returns_what_was_stored(
        self, kernels: AttentionKernels, any_precision: tuple[torch.dtype, str], head_dim: int
    ) -> None:
        batch = self._batch(kernels, _spec(head_dim), 16, any_precision, [(40, 1), (0, 1), (3, 9), (0, 20), (70, 18)])
        k, v = kernels.read(batch.storage, self._slots(batch))
        kv_dtype = batch.storage.spec.kv_dtype
        assert k.dtype == v.dtype == torch.float32
        for stored, original in ((k, batch.k), (v, batch.v)):
            if kv_dtype.is_quantized:
                step = torch.finfo(kv_dtype.storage).eps if kv_dtype.storage.is_floating_point else 2.0**-kv_dtype.bits
                bound = 4 * step * original.abs().max().float()
                assert (stored - original.float()).abs().max() <= bound
            else:
                assert torch.equal(stored, original.to(kv_dtype.storage).float())

    def test_padding_slots_are_stored_nowhere(
        self, kernels: AttentionKernels, any_kv_dtype: tuple[torch.dtype, str]
    ) -> None:
        batch = self._batch(kernels, _spec(64), 16, any_kv_dtype, [(20, 1), (7, 9)])
        before = {name: tensor.clone() for name, tensor in batch.storage.tensors.items()}
        padding = [Row(0, 0, torch.zeros(0, dtype=torch.int64)) for _ in range(3)]
        kernels.store(batch.storage, batch.k[:3], batch.v[:3], make_metadata(padding, 16, self.device))
        assert all(_same_bytes(tensor, before[name]) for name, tensor in batch.storage.tensors.items())

    def test_blocks_are_copied_whole(self, kernels: AttentionKernels, any_kv_dtype: tuple[torch.dtype, str]) -> None:
        batch = self._batch(kernels, _spec(80), 16, any_kv_dtype, [(0, 64)], num_spare_blocks=4)
        filled = batch.rows[0].blocks.tolist()
        spare = sorted(set(range(batch.storage.num_blocks)) - set(filled))
        before = [x.clone() for x in self._read_blocks(kernels, batch.storage, range(batch.storage.num_blocks))]
        kernels.copy_blocks(batch.storage, _copies(filled[:3], spare[:3]))
        kernels.copy_blocks(batch.storage, [])
        after = self._read_blocks(kernels, batch.storage, range(batch.storage.num_blocks))
        for old, new in zip(before, after, strict=True):
            expected = old.clone()
            expected[spare[:3]] = old[filled[:3]]
            assert torch.equal(new, expected)

    def test_blocks_survive_a_swap_out_and_in(
        self, kernels: AttentionKernels, any_kv_dtype: tuple[torch.dtype, str]
    ) -> None:
        batch = self._batch(kernels, _spec(80), 16, any_kv_dtype, [(0, 80)])
        storage, filled = batch.storage, batch.rows[0].blocks.tolist()
        host = replace(
            storage,
            num_blocks=9,
            tensors={n: torch.zeros(9, *t.shape[1:], dtype=t.dtype) for n, t in storage.tensors.items()},
        )
        before = [x.clone() for x in self._read_blocks(kernels, storage, filled)]
        kernels.swap_blocks(storage, host, _copies(filled, [8, 0, 3, 5, 1]))
        for tensor in storage.tensors.values():
            tensor.view(torch.uint8).zero_()
        kernels.swap_blocks(host, storage, _copies([8, 0, 3, 5, 1], filled))
        for old, new in zip(before, self._read_blocks(kernels, storage, filled), strict=True):
            assert old.any()
            assert torch.equal(new, old)

    # Attention

    def test_every_precision(self, kernels: AttentionKernels, any_precision: tuple[torch.dtype, str]) -> None:
        lengths = [(0, 1), (1, 1), (15, 1), (16, 1), (17, 1), (83, 1), (0, 2), (0, 47), (31, 33), (64, 16)]
        self._check(kernels, self._batch(kernels, _spec(64), 16, any_precision, lengths))

    def test_head_dims(self, kernels: AttentionKernels, precision: tuple[torch.dtype, str], head_dim: int) -> None:
        lengths = [(0, 1), (61, 1), (130, 1), (0, 35), (29, 13)]
        self._check(kernels, self._batch(kernels, _spec(head_dim), 16, precision, lengths))

    def test_query_heads_a_kv_head(
        self, kernels: AttentionKernels, precision: tuple[torch.dtype, str], group_size: int
    ) -> None:
        spec = _spec(64, group_size=group_size)
        self._check(kernels, self._batch(kernels, spec, 16, precision, [(0, 1), (77, 1), (141, 1), (0, 37), (18, 5)]))

    def test_block_sizes(self, kernels: AttentionKernels, precision: tuple[torch.dtype, str], block_size: int) -> None:
        b = block_size
        lengths = [(0, 1), (b - 1, 1), (b, 1), (b + 1, 1), (2 * b - 2, 1), (0, b), (0, b + 1), (b - 3, 7), (2 * b, 9)]
        self._check(kernels, self._batch(kernels, _spec(64), block_size, precision, lengths))

    def test_features(self, kernels: AttentionKernels, precision: tuple[torch.dtype, str], feature: str) -> None:
        spec = _FEATURES[feature](_spec(64))
        lengths = [(0, 1), (18, 1), (19, 1), (137, 1), (0, 80), (45, 50), (100, 3)]
        self._check(kernels, self._batch(kernels, spec, 16, precision, lengths))

    def test_long_contexts_beside_short_ones(
        self, kernels: AttentionKernels, precision: tuple[torch.dtype, str]
    ) -> None:
        longest = self.profile.max_context_tokens
        lengths = [(longest - 1, 1), (0, 1), (5, 1), (longest // 2, 1), (longest - 40, 40), (0, 3)]
        self._check(kernels, self._batch(kernels, _spec(64), 16, precision, lengths))

    def test_one_decode_of_one_token_returns_its_value(
        self, kernels: AttentionKernels, precision: tuple[torch.dtype, str]
    ) -> None:
        batch = self._batch(kernels, _spec(64), 16, precision, [(0, 1)])
        out = self._attend(kernels, batch)
        _, v = kernels.read(batch.storage, self._slots(batch))
        assert torch.equal(out, v.repeat_interleave(3, 1).to(out.dtype))

    def test_random_batches(self, kernels: AttentionKernels, precision: tuple[torch.dtype, str]) -> None:
        profile = self.profile
        length = st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.just(1), st.integers(2, 60)))

        @settings(
            max_examples=profile.num_random_batches,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(
            lengths=st.lists(length, min_size=1, max_size=6),
            head_dim=st.sampled_from(profile.head_dims),
            num_kv_heads=st.integers(1, 3),
            group_size=st.sampled_from(profile.group_sizes),
            block_size=st.sampled_from(profile.block_sizes),
            sliding_window=st.one_of(st.none(), st.integers(1, 100)),
            softcap=st.sampled_from((None, None, 1.5)),
            has_sinks=st.booleans(),
            has_alibi=st.booleans(),
            seed=st.integers(0, 2**20),
        )
        def check(
            lengths: list[tuple[int, int]],
            head_dim: int,
            num_kv_heads: int,
            group_size: int,
            block_size: int,
            sliding_window: int | None,
            softcap: float | None,
            has_sinks: bool,
            has_alibi: bool,
            seed: int,
        ) -> None:
            spec = AttentionSpec(
                num_kv_heads * group_size,
                num_kv_heads,
                head_dim,
                head_dim,
                sliding_window,
                softcap,
                has_sinks,
                has_alibi,
            )
            self._check(kernels, self._batch(kernels, spec, block_size, precision, lengths, seed=seed))

        check()

    def test_scales_from_outside_are_applied_to_each_head(
        self, kernels: AttentionKernels, any_kv_dtype: tuple[torch.dtype, str]
    ) -> None:
        kv_dtype = find_kv_dtype(any_kv_dtype[1])
        if ScaleGranularity.STATIC not in (kv_dtype.key_scales, kv_dtype.value_scales):
            pytest.skip(f"{kv_dtype.name} has no scales from outside its blocks")
        lengths = [(0, 1), (50, 1), (20, 30)]
        batch = self._batch(kernels, _spec(64), 16, any_kv_dtype, lengths)
        doubled = self._batch(kernels, _spec(64), 16, any_kv_dtype, lengths, static_factor=2.0)
        self._check(kernels, doubled)
        same_bytes = replace(batch.storage, static_scales=doubled.storage.static_scales)
        for once, twice in zip(
            kernels.read(batch.storage, self._slots(batch)), kernels.read(same_bytes, self._slots(batch)), strict=True
        ):
            assert torch.equal(2 * once, twice)

    # What must not matter

    def test_slots_that_hold_no_token_never_matter(
        self, kernels: AttentionKernels, precision: tuple[torch.dtype, str], poison: str
    ) -> None:
        """NaN and Inf stand in every slot beyond the contexts, as in blocks that served others before."""
        longest = self.profile.max_context_tokens
        lengths = [(longest - 1, 1), (0, 1), (36, 1), (longest - 20, 20), (0, 5), (2, 33)]
        for group_size in (1, self.profile.group_sizes[-1]):
            spec = _spec(64, group_size=group_size, num_kv_heads=2)
            clean = self._batch(kernels, spec, 16, precision, lengths)
            poisoned = self._batch(kernels, spec, 16, precision, lengths, poison=_POISONS[poison])
            out = self._attend(kernels, poisoned)
            assert out.isfinite().all()
            assert torch.equal(out, self._attend(kernels, clean))

    def test_features_keep_away_from_slots_that_hold_no_token(
        self, kernels: AttentionKernels, precision: tuple[torch.dtype, str], feature: str
    ) -> None:
        lengths = [(40, 1), (0, 1), (53, 1), (20, 20), (0, 5)]
        spec = _FEATURES[feature](_spec(64))
        self._check(kernels, self._batch(kernels, spec, 16, precision, lengths, poison=(float("nan"), float("nan"))))

    def test_padding_rows_are_zero_and_change_no_other_row(
        self, kernels: AttentionKernels, precision: tuple[torch.dtype, str]
    ) -> None:
        batch = self._batch(kernels, _spec(64), 16, precision, [(33, 1), (0, 1), (4, 17)])
        plain = self._attend(kernels, batch)
        decodes, rest = batch.rows[:2], batch.rows[2:]
        for content in (0.0, 1e4, float("nan"), float("inf")):
            rows = [*decodes, Row(0, 0, torch.tensor([1])), Row(0, 0, torch.tensor([0])), *rest]
            q = torch.cat([batch.q[:2], torch.full_like(batch.q[:2], content), batch.q[2:]])
            out = kernels.attend(q, batch.storage, make_metadata(rows, 16, self.device), batch.options)
            assert torch.equal(torch.cat([out[:2], out[4:]]), plain)
            assert not out[2:4].any()

    def test_strided_inputs(self, kernels: AttentionKernels, precision: tuple[torch.dtype, str]) -> None:
        """Queries, keys and values are slices of one fused projection."""
        spec = _spec(64)
        batch = self._batch(kernels, spec, 16, precision, [(0, 30)])
        heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        q, k, v = torch.split(torch.cat([batch.q, batch.k, batch.v], 1), heads, 1)
        assert not any(x.is_contiguous() for x in (q, k, v))
        storage = replace(
            kernels.allocate(batch.storage.spec, batch.storage.num_blocks), static_scales=batch.storage.static_scales
        )
        metadata = make_metadata(batch.rows, 16, self.device)
        kernels.store(storage, k, v, metadata)
        assert torch.equal(kernels.attend(q, storage, metadata, batch.options), self._attend(kernels, batch))

    def test_inputs_are_left_alone(self, kernels: AttentionKernels, precision: tuple[torch.dtype, str]) -> None:
        batch = self._batch(kernels, _spec(64), 16, precision, [(0, 30), (9, 1)])
        q = batch.q.clone()
        stored = {name: tensor.clone() for name, tensor in batch.storage.tensors.items()}
        self._attend(kernels, batch)
        assert torch.equal(batch.q, q)
        assert all(_same_bytes(tensor, stored[name]) for name, tensor in batch.storage.tensors.items())

    def test_offsets_beyond_31_bits(self, kernels: AttentionKernels, any_kv_dtype: tuple[torch.dtype, str]) -> None:
        """The last block begins more than 2^31 elements into keys and into values."""
        if not self.profile.has_large_offsets:
            pytest.skip("the profile has no large offsets")
        spec = AttentionSpec(num_heads=8, num_kv_heads=8, head_dim=256, v_head_dim=256)
        cache_spec = self._cache_spec(kernels, spec, 256, *any_kv_dtype)
        num_blocks = 2**31 // (8 * 256 * 256) + 3
        small = kernels.allocate(cache_spec, 1)
        storage = replace(
            small,
            num_blocks=num_blocks,
            tensors={name: self._lazy_zeros(num_blocks, tensor) for name, tensor in small.tensors.items()},
            static_scales=self._static_scales(cache_spec, 1.0),
        )
        rows = [Row(300, 1, torch.tensor([num_blocks - 1, 0])), Row(290, 20, torch.tensor([num_blocks - 2, 1]))]
        batch = self._fill(kernels, spec, storage, rows, any_kv_dtype[0], torch.Generator().manual_seed(0))
        self._check(kernels, batch)
        kernels.copy_blocks(storage, _copies([num_blocks - 1], [2]))
        assert torch.equal(*(self._read_blocks(kernels, storage, [block])[0] for block in (num_blocks - 1, 2)))

    # Helpers

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
        """Stores random tokens in blocks that hold zeros, or what `poison` (of keys, of values) says.

        Storage, slots, tokens and queries depend on the other arguments alone, so that two calls make equal batches.
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
        """Holds the kernels' output against dense attention over what they stored."""
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
        """Scales for KV dtypes that take theirs from outside: another one for each head, for keys and for values."""
        kv_dtype = cache_spec.kv_dtype
        if ScaleGranularity.STATIC not in (kv_dtype.key_scales, kv_dtype.value_scales):
            return None
        is_float = kv_dtype.storage.is_floating_point
        largest = torch.finfo(kv_dtype.storage).max if is_float else 2.0 ** (kv_dtype.bits - 1) - 1
        heads = torch.arange(1, cache_spec.num_kv_heads + 1, dtype=torch.float32, device=self.device)
        return factor * (5 + heads / 4) / largest, factor * (6 + heads / 2) / largest

    def _lazy_zeros(self, num_blocks: int, like: torch.Tensor) -> torch.Tensor:
        """Zeros of which a CPU maps only the pages that are touched. Skips the test where there is no room."""
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
    """Entry points are read once, not for each of some thousand tests."""
    return find_plugin(KERNELS, name)


def _spec(head_dim: int, *, group_size: int = 3, num_kv_heads: int = 3) -> AttentionSpec:
    return AttentionSpec(group_size * num_kv_heads, num_kv_heads, head_dim, head_dim)


def _copies(sources: Sequence[int], targets: Sequence[int]) -> list[BlockCopy]:
    return [BlockCopy(BlockId(source), BlockId(target)) for source, target in zip(sources, targets, strict=True)]


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _name_choice(choice: object) -> str:
    if isinstance(choice, tuple):
        dtype, kv_dtype_name = choice
        return f"{str(dtype).removeprefix('torch.')}-{kv_dtype_name}"
    return str(choice).replace(" ", "_")
