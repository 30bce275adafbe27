"""Decode steps from fixed buffers at padded batch sizes, so that a CUDA graph can replay them.

A decode step of a small batch is bound by the hundreds of kernel launches of a model, not by the kernels. A graph
replays them in one launch, but always with the same tensors: a step's batch is copied into fixed buffers and padded to
the next captured size with rows that have no context and write nowhere. Without a GPU the same buffers feed an
ordinary forward, which is how tests reach this code.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pagedkv.plugin.attention_metadata import PADDING_SLOT, AttentionMetadata
from pagedkv.plugin.backend.step_input import Int32Array, Int64Array, StepInput
from pagedkv.plugin.interface import ModelInput

Forward = Callable[[ModelInput, AttentionMetadata], torch.Tensor]


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """Input of a decode step at the largest batch size, filled anew for each step; sizes use the leading rows."""

    token_ids: torch.Tensor
    """[max_rows] int64, as positions."""
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    """[max_rows] int64; PADDING_SLOT in padding rows."""
    seq_lens: torch.Tensor
    """[max_rows] int32; 0 in padding rows."""
    block_table: torch.Tensor
    """[max_rows, max_blocks] int32."""
    row_starts: torch.Tensor
    """[max_rows + 1] int32: 0, 1, 2, …"""
    logit_rows: torch.Tensor
    """[max_rows] int64: 0, 1, 2, …"""
    max_seq_len: int

    @classmethod
    def create(cls, max_rows: int, max_seq_len: int, block_size: int, device: torch.device) -> DecodeBuffers:
        max_blocks = -(-max_seq_len // block_size)
        return cls(
            token_ids=torch.zeros(max_rows, dtype=torch.int64, device=device),
            positions=torch.zeros(max_rows, dtype=torch.int64, device=device),
            slot_mapping=torch.full((max_rows,), PADDING_SLOT, dtype=torch.int64, device=device),
            seq_lens=torch.zeros(max_rows, dtype=torch.int32, device=device),
            block_table=torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device),
            row_starts=torch.arange(max_rows + 1, dtype=torch.int32, device=device),
            logit_rows=torch.arange(max_rows, dtype=torch.int64, device=device),
            max_seq_len=max_seq_len,
        )

    def fill(self, step_input: StepInput, size: int) -> None:
        """Takes a step's rows and makes those from there up to `size` padding."""
        num_rows = len(step_input.token_ids)
        _fill(self.token_ids, step_input.token_ids)
        _fill(self.positions, step_input.positions)
        _fill(self.slot_mapping, step_input.slot_mapping)
        _fill(self.seq_lens, step_input.seq_lens)
        _fill(self.block_table[:, : step_input.block_table.shape[1]], step_input.block_table)
        self.slot_mapping[num_rows:size] = PADDING_SLOT
        self.seq_lens[num_rows:size] = 0
        self.token_ids[num_rows:size] = 0
        self.positions[num_rows:size] = 0

    def model_input(self, size: int) -> ModelInput:
        return ModelInput(self.token_ids[:size], self.positions[:size], self.logit_rows[:size])

    def metadata(self, size: int) -> AttentionMetadata:
        return AttentionMetadata(
            cu_seqlens_q=self.row_starts[: size + 1],
            seq_lens=self.seq_lens[:size],
            block_table=self.block_table[:size],
            slot_mapping=self.slot_mapping[:size],
            max_query_len=1,
            max_seq_len=self.max_seq_len,
            num_decodes=size,
        )


class PaddedDecodes:
    """Runs decode steps at the sizes given; larger ones are not for it."""

    def __init__(
        self, forward: Forward, sizes: Sequence[int], max_seq_len: int, block_size: int, device: torch.device
    ) -> None:
        """`sizes` is not empty."""
        self._sizes = sorted(sizes)
        self._forward = forward
        self._buffers = DecodeBuffers.create(self._sizes[-1], max_seq_len, block_size, device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def capture(self) -> None:
        """Captures a graph a size, largest first, so that the smaller ones live in its memory.

        Raises:
            RuntimeError: the model or the kernels do something that a graph can't hold.
        """
        memory_pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            self._run(size)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory_pool):
                logits = self._run(size)
            self._graphs[size] = (graph, logits)

    def can_run(self, step_input: StepInput) -> bool:
        """Whether every row is a decode that samples, and they fit the largest size."""
        num_tokens = len(step_input.token_ids)
        return (
            step_input.max_query_len == 1
            and len(step_input.logit_rows) == step_input.num_sampling_rows == num_tokens
            and num_tokens <= self._sizes[-1]
        )

    def run(self, step_input: StepInput) -> torch.Tensor:
        """[num_rows, vocab_size] logits; valid until the next call."""
        num_rows = len(step_input.token_ids)
        size = self._sizes[bisect.bisect_left(self._sizes, num_rows)]
        self._buffers.fill(step_input, size)
        if size not in self._graphs:
            return self._run(size)[:num_rows]
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[:num_rows]

    def _run(self, size: int) -> torch.Tensor:
        return self._forward(self._buffers.model_input(size), self._buffers.metadata(size))


def _fill(target: torch.Tensor, rows: Int32Array | Int64Array) -> None:
    target[: len(rows)].copy_(torch.from_numpy(rows), non_blocking=True)
