"""Conformance suite for `ModelAdapter` plugins, in pytest.

A plugin author's test file:

    from pagedkv.plugin.conformance.model_adapter import ModelAdapterConformance

    class TestMyAdapter(ModelAdapterConformance):
        def make_adapter(self) -> ModelAdapter:           # of a small model in float32, on the CPU
            return MyAdapter.load(config, torch.device("cpu"))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch

from pagedkv.plugin.attention_metadata import AttentionContext, AttentionMetadata, AttentionOptions
from pagedkv.plugin.interface import AttentionKernels, KVStorage, ModelAdapter, ModelInput
from pagedkv.plugin.kv_dtypes import FP32
from pagedkv.plugin.registry import KERNELS, load_plugin

BLOCK_SIZE = 16
NUM_BLOCKS = 32
TOLERANCE = 1e-4
"""Largest difference of the logits of one token in two batches, relative to the largest logit."""

Chunk = tuple[int, int, int]
"""Sequence, first token, number of tokens."""


class CountingKernels:
    """Records which layer's storage was attended to."""

    def __init__(self, kernels: AttentionKernels, storage: Sequence[KVStorage]) -> None:
        self._kernels = kernels
        self._storage = storage
        self.calls: list[int] = []

    def store(self, storage: KVStorage, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> None:
        self._kernels.store(storage, k, v, metadata)

    def attend(
        self, q: torch.Tensor, storage: KVStorage, metadata: AttentionMetadata, options: AttentionOptions
    ) -> torch.Tensor:
        self.calls.append(next(index for index, one in enumerate(self._storage) if one is storage))
        return self._kernels.attend(q, storage, metadata, options)


class PagedForward:
    """Runs chunks of sequences through an adapter, over blocks of the reference kernels. Each sequence has its own."""

    def __init__(self, adapter: ModelAdapter, sequences: Sequence[Sequence[int]]) -> None:
        self._adapter = adapter
        self._sequences = sequences
        kernels = load_plugin(KERNELS, "reference").create(torch.device("cpu"))
        storage = [
            kernels.allocate(layer.cache_spec(BLOCK_SIZE, FP32), NUM_BLOCKS * len(sequences))
            for layer in adapter.spec.layers
        ]
        self.kernels = CountingKernels(kernels, storage)
        self._storage = storage
        order = torch.randperm(NUM_BLOCKS * len(sequences), generator=torch.Generator().manual_seed(0))
        self._block_table = order.int().view(len(sequences), NUM_BLOCKS)

    def run(self, chunks: Sequence[Chunk], logit_rows: Sequence[int] | None = None) -> torch.Tensor:
        """Returns [num_rows, vocab_size] float32 logits, of every token unless rows are given."""
        positions = torch.cat([torch.arange(start, start + num) for _, start, num in chunks])
        token_ids = torch.tensor([id_ for i, start, num in chunks for id_ in self._sequences[i][start : start + num]])
        rows = torch.tensor([row for row, (_, _, num) in enumerate(chunks) for _ in range(num)])
        table = self._block_table[[i for i, _, _ in chunks]]
        lengths = torch.tensor([num for _, _, num in chunks])
        metadata = AttentionMetadata(
            cu_seqlens_q=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
            seq_lens=torch.tensor([start + num for _, start, num in chunks], dtype=torch.int32),
            block_table=table,
            slot_mapping=table[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
            max_query_len=int(lengths.max()),
            max_seq_len=max(start + num for _, start, num in chunks),
            num_decodes=next((i for i, num in enumerate(lengths.tolist()) if num != 1), len(chunks)),
        )
        wanted = torch.arange(len(positions)) if logit_rows is None else torch.tensor(logit_rows)
        context = AttentionContext(self.kernels, self._storage, metadata)  # type: ignore[arg-type]
        return self._adapter.forward(ModelInput(token_ids, positions, wanted), context).float()


class ModelAdapterConformance:
    """The suite. Subclass it and implement `make_adapter`."""

    sequences: ClassVar[Sequence[Sequence[int]]] = (list(range(3, 60)), [9, 4] * 20, [7] * 33)
    """Sequences of token ids within the model's vocabulary, at most 512 tokens each."""

    def make_adapter(self) -> ModelAdapter:
        """Returns an adapter with a small model in float32 loaded on the CPU."""
        raise NotImplementedError

    @pytest.fixture
    def adapter(self) -> ModelAdapter:
        return self.make_adapter()

    @pytest.fixture
    def whole(self, adapter: ModelAdapter) -> list[torch.Tensor]:
        """Logits of every token of each sequence, each run alone and in one step."""
        return [
            PagedForward(adapter, self.sequences).run([(index, 0, len(sequence))])
            for index, sequence in enumerate(self.sequences)
        ]

    def test_every_layer_attends_once_in_order(self, adapter: ModelAdapter) -> None:
        forward = PagedForward(adapter, self.sequences)
        forward.run([(0, 0, 5), (1, 0, 3)])
        assert forward.kernels.calls == list(range(len(adapter.spec.layers)))

    def test_sequences_of_a_batch_do_not_see_each_other(self, adapter: ModelAdapter, whole: list[torch.Tensor]) -> None:
        chunks = [(index, 0, len(sequence)) for index, sequence in enumerate(self.sequences)]
        _assert_close(PagedForward(adapter, self.sequences).run(chunks), torch.cat(whole))

    def test_chunks_beside_decodes_equal_the_whole(self, adapter: ModelAdapter, whole: list[torch.Tensor]) -> None:
        forward = PagedForward(adapter, self.sequences)
        num_first = [len(sequence) - 3 for sequence in self.sequences]
        forward.run([(1, 0, num_first[1]), (0, 0, 10)])
        _assert_close(
            forward.run([(1, num_first[1], 1), (0, 10, 17), (2, 0, 20)]),
            torch.cat([whole[1][num_first[1], None], whole[0][10:27], whole[2][:20]]),
        )
        _assert_close(
            forward.run([(1, num_first[1] + 1, 1), (2, 20, 1), (0, 27, 4)]),
            torch.cat([whole[1][num_first[1] + 1, None], whole[2][20, None], whole[0][27:31]]),
        )

    def test_logits_are_those_of_the_rows_asked_for(self, adapter: ModelAdapter, whole: list[torch.Tensor]) -> None:
        rows = [len(self.sequences[0]) - 1, 0, 5]
        logits = PagedForward(adapter, self.sequences).run([(0, 0, len(self.sequences[0]))], rows)
        assert logits.shape == (3, adapter.spec.vocab_size)
        _assert_close(logits, whole[0][rows])

    def test_two_loaded_models_do_not_meet(self, adapter: ModelAdapter, whole: list[torch.Tensor]) -> None:
        one, other = (PagedForward(model, self.sequences) for model in (adapter, self.make_adapter()))
        one.run([(0, 0, 9)])
        other.run([(1, 0, 9)])
        _assert_close(one.run([(0, 9, 1)]), whole[0][9:10])
        _assert_close(other.run([(1, 9, 1)]), whole[1][9:10])


def _assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted.float()).abs().max() <= TOLERANCE * max(1.0, float(wanted.abs().max()))
