"""Conformance suite for `AttentionKernels` plugins, in pytest. It loads the plugin by its registered name.

A plugin author's test file:

    import torch
    from pagedkv.plugin.conformance.kernels import REDUCED, KernelsConformance

    class TestMyKernels(KernelsConformance):
        kernels_name = "mine"                          # as in [project.entry-points."pagedkv.kernels"]
        device = torch.device("cuda")                  # default: the CPU
        dtypes = (torch.float16, torch.bfloat16)       # of queries; default: float32, bfloat16, float16
        profile = REDUCED                              # smaller sizes, for slow devices; default: FULL

pytest runs it like any test class; `pytest` and `hypothesis` must be installed. Each test runs for all registered KV
dtypes, and is skipped, with the reasons, for those that the plugin's `unsupported_reasons` refuses.

Values are compared with float64 dense attention over what `read` returns. The root mean square error may be twice that
of torch's own attention in the dtype of the queries, plus one unit in the last place. The largest single error, which
depends on a few roundings, may be four times torch's largest.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedkv.plugin.conformance.attention_oracle import (
    Row,
    make_metadata,
)
from pagedkv.plugin.conformance.kernels_harness import (
    FEATURES,
    FULL,
    POISONS,
    REDUCED,
    KernelsHarness,
    Profile,
    has_same_bytes,
    make_copies,
    make_spec,
)
from pagedkv.plugin.interface import AttentionKernels
from pagedkv.plugin.model_spec import AttentionSpec

__all__ = ["FULL", "REDUCED", "KernelsConformance", "Profile"]


class KernelsConformance(KernelsHarness):
    """The suite. Subclass it and set what the module's docstring shows."""

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
        batch = self._batch(
            kernels, make_spec(head_dim), 16, any_precision, [(40, 1), (0, 1), (3, 9), (0, 20), (70, 18)]
        )
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
        batch = self._batch(kernels, make_spec(64), 16, any_kv_dtype, [(20, 1), (7, 9)])
        before = {name: tensor.clone() for name, tensor in batch.storage.tensors.items()}
        padding = [Row(0, 0, torch.zeros(0, dtype=torch.int64)) for _ in range(3)]
        kernels.store(batch.storage, batch.k[:3], batch.v[:3], make_metadata(padding, 16, self.device))
        assert all(has_same_bytes(tensor, before[name]) for name, tensor in batch.storage.tensors.items())

    def test_blocks_are_copied_whole(self, kernels: AttentionKernels, any_kv_dtype: tuple[torch.dtype, str]) -> None:
        batch = self._batch(kernels, make_spec(80), 16, any_kv_dtype, [(0, 64)], num_spare_blocks=4)
        filled = batch.rows[0].blocks.tolist()
        spare = sorted(set(range(batch.storage.num_blocks)) - set(filled))
        before = [x.clone() for x in self._read_blocks(kernels, batch.storage, range(batch.storage.num_blocks))]
        kernels.copy_blocks(batch.storage, make_copies(filled[:3], spare[:3]))
        kernels.copy_blocks(batch.storage, [])
        after = self._read_blocks(kernels, batch.storage, range(batch.storage.num_blocks))
        for old, new in zip(before, after, strict=True):
            expected = old.clone()
            expected[spare[:3]] = old[filled[:3]]
            assert torch.equal(new, expected)

    # Attention

    def test_every_precision(self, kernels: AttentionKernels, any_precision: tuple[torch.dtype, str]) -> None:
        lengths = [(0, 1), (1, 1), (15, 1), (16, 1), (17, 1), (83, 1), (0, 2), (0, 47), (31, 33), (64, 16)]
        self._check(kernels, self._batch(kernels, make_spec(64), 16, any_precision, lengths))

    def test_head_dims(self, kernels: AttentionKernels, precision: tuple[torch.dtype, str], head_dim: int) -> None:
        lengths = [(0, 1), (61, 1), (130, 1), (0, 35), (29, 13)]
        self._check(kernels, self._batch(kernels, make_spec(head_dim), 16, precision, lengths))

    def test_query_heads_a_kv_head(
        self, kernels: AttentionKernels, precision: tuple[torch.dtype, str], group_size: int
    ) -> None:
        spec = make_spec(64, group_size=group_size)
        self._check(kernels, self._batch(kernels, spec, 16, precision, [(0, 1), (77, 1), (141, 1), (0, 37), (18, 5)]))

    def test_block_sizes(self, kernels: AttentionKernels, precision: tuple[torch.dtype, str], block_size: int) -> None:
        b = block_size
        lengths = [(0, 1), (b - 1, 1), (b, 1), (b + 1, 1), (2 * b - 2, 1), (0, b), (0, b + 1), (b - 3, 7), (2 * b, 9)]
        self._check(kernels, self._batch(kernels, make_spec(64), block_size, precision, lengths))

    def test_features(self, kernels: AttentionKernels, precision: tuple[torch.dtype, str], feature: str) -> None:
        spec = FEATURES[feature](make_spec(64))
        lengths = [(0, 1), (18, 1), (19, 1), (137, 1), (0, 80), (45, 50), (100, 3)]
        self._check(kernels, self._batch(kernels, spec, 16, precision, lengths))

    def test_long_contexts_beside_short_ones(
        self, kernels: AttentionKernels, precision: tuple[torch.dtype, str]
    ) -> None:
        longest = self.profile.max_context_tokens
        lengths = [(longest - 1, 1), (0, 1), (5, 1), (longest // 2, 1), (longest - 40, 40), (0, 3)]
        self._check(kernels, self._batch(kernels, make_spec(64), 16, precision, lengths))

    def test_one_decode_of_one_token_returns_its_value(
        self, kernels: AttentionKernels, precision: tuple[torch.dtype, str]
    ) -> None:
        batch = self._batch(kernels, make_spec(64), 16, precision, [(0, 1)])
        out = self._attend(kernels, batch)
        _, v = kernels.read(batch.storage, self._slots(batch))
        expected = v.repeat_interleave(3, 1)
        if batch.storage.spec.kv_dtype.has_rotated_values:
            # Outputs may be rounded to their dtype before they are rotated back, and once more after that.
            bound = torch.finfo(out.dtype).eps * expected.norm(dim=-1).max()
            assert (out.float() - expected).abs().max() <= bound
        else:
            assert torch.equal(out, expected.to(out.dtype))

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
        self, kernels: AttentionKernels, static_kv_dtype: tuple[torch.dtype, str]
    ) -> None:
        lengths = [(0, 1), (50, 1), (20, 30)]
        batch = self._batch(kernels, make_spec(64), 16, static_kv_dtype, lengths)
        doubled = self._batch(kernels, make_spec(64), 16, static_kv_dtype, lengths, static_factor=2.0)
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
        """Fills every slot after the contexts with NaN and Inf, as in blocks that other sequences have used."""
        longest = self.profile.max_context_tokens
        lengths = [(longest - 1, 1), (0, 1), (36, 1), (longest - 20, 20), (0, 5), (2, 33)]
        for group_size in (1, self.profile.group_sizes[-1]):
            spec = make_spec(64, group_size=group_size, num_kv_heads=2)
            clean = self._batch(kernels, spec, 16, precision, lengths)
            poisoned = self._batch(kernels, spec, 16, precision, lengths, poison=POISONS[poison])
            out = self._attend(kernels, poisoned)
            assert out.isfinite().all()
            assert torch.equal(out, self._attend(kernels, clean))

    def test_features_keep_away_from_slots_that_hold_no_token(
        self, kernels: AttentionKernels, precision: tuple[torch.dtype, str], feature: str
    ) -> None:
        lengths = [(40, 1), (0, 1), (53, 1), (20, 20), (0, 5)]
        spec = FEATURES[feature](make_spec(64))
        self._check(kernels, self._batch(kernels, spec, 16, precision, lengths, poison=(float("nan"), float("nan"))))

    def test_padding_rows_are_zero_and_change_no_other_row(
        self, kernels: AttentionKernels, precision: tuple[torch.dtype, str]
    ) -> None:
        batch = self._batch(kernels, make_spec(64), 16, precision, [(33, 1), (0, 1), (4, 17)])
        plain = self._attend(kernels, batch)
        decodes, rest = batch.rows[:2], batch.rows[2:]
        for content in (0.0, 1e4, float("nan"), float("inf")):
            rows = [*decodes, Row(0, 0, torch.tensor([1])), Row(0, 0, torch.tensor([0])), *rest]
            q = torch.cat([batch.q[:2], torch.full_like(batch.q[:2], content), batch.q[2:]])
            out = kernels.attend(q, batch.storage, make_metadata(rows, 16, self.device), batch.options)
            assert torch.equal(torch.cat([out[:2], out[4:]]), plain)
            assert not out[2:4].any()

    def test_strided_inputs(self, kernels: AttentionKernels, precision: tuple[torch.dtype, str]) -> None:
        """Passes queries, keys and values as slices of one fused projection."""
        spec = make_spec(64)
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
        batch = self._batch(kernels, make_spec(64), 16, precision, [(0, 30), (9, 1)])
        q = batch.q.clone()
        stored = {name: tensor.clone() for name, tensor in batch.storage.tensors.items()}
        self._attend(kernels, batch)
        assert torch.equal(batch.q, q)
        assert all(has_same_bytes(tensor, stored[name]) for name, tensor in batch.storage.tensors.items())

    def test_offsets_beyond_31_bits(self, kernels: AttentionKernels, far_kv_dtype: tuple[torch.dtype, str]) -> None:
        """Uses a last block that begins more than 2^31 elements into keys and into values."""
        spec = AttentionSpec(num_heads=8, num_kv_heads=8, head_dim=256, v_head_dim=256)
        cache_spec = self._cache_spec(kernels, spec, 256, *far_kv_dtype)
        num_blocks = 2**31 // (8 * 256 * 256) + 3
        small = kernels.allocate(cache_spec, 1)
        storage = replace(
            small,
            num_blocks=num_blocks,
            tensors={name: self._lazy_zeros(num_blocks, tensor) for name, tensor in small.tensors.items()},
            static_scales=self._static_scales(cache_spec, 1.0),
        )
        rows = [Row(300, 1, torch.tensor([num_blocks - 1, 0])), Row(290, 20, torch.tensor([num_blocks - 2, 1]))]
        batch = self._fill(kernels, spec, storage, rows, far_kv_dtype[0], torch.Generator().manual_seed(0))
        self._check(kernels, batch)
        kernels.copy_blocks(storage, make_copies([num_blocks - 1], [2]))
        assert torch.equal(*(self._read_blocks(kernels, storage, [block])[0] for block in (num_blocks - 1, 2)))
