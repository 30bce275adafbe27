"""Runs decode steps from fixed buffers at padded batch sizes, so that a CUDA graph can replay them.

The time of a decode step of a small batch is the time of the model's hundreds of kernel launches, not of the kernels. A
graph replays them in one launch, but always with the same tensors. So a step's batch is copied into fixed buffers and
padded to the next captured size with rows that have no context and store nothing. Without a GPU an ordinary forward
reads the same buffers; tests use this.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagedkv.plugin.abilities import HostLengths, PreparesSteps
from pagedkv.plugin.attention_metadata import PADDING_SLOT, AttentionMetadata
from pagedkv.plugin.backend.step_input import Int32Array, Int64Array, StepInput
from pagedkv.plugin.interface import ModelInput

Forward = Callable[[ModelInput, AttentionMetadata], torch.Tensor]


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """Inputs of decode steps at the largest batch size, filled for each step. Smaller sizes use the first rows."""

    token_ids: torch.Tensor
    """[max_rows] int64; `positions` likewise."""
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
        """Copies a step's rows into the buffers and fills the rows up to `size` with padding."""
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
    """Runs decode steps at the given sizes. It can't run larger ones."""

    def __init__(
        self,
        forward: Forward,
        sizes: Sequence[int],
        max_seq_len: int,
        block_size: int,
        device: torch.device,
        kernels: PreparesSteps | None = None,
    ) -> None:
        """Makes the buffers. `sizes` must not be empty; `kernels` are told of each step."""
        self._sizes = sorted(sizes)
        self._forward = forward
        self._buffers = DecodeBuffers.create(self._sizes[-1], max_seq_len, block_size, device)
        self._kernels = kernels
        self._metadata = {size: self._buffers.metadata(size) for size in self._sizes}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def capture(self) -> None:
        """Captures a graph for each size, largest first, so that smaller ones use its memory.

        Raises:
            RuntimeError: the model or the kernels do something that can't be captured.
        """
        memory_pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            if self._kernels is not None:
                self._kernels.begin_step(self._metadata[size], _lengths_of_padding(size))
            self._run(size)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory_pool):
                logits = self._run(size)
            self._graphs[size] = (graph, logits)

    def can_run(self, step_input: StepInput) -> bool:
        """Whether every row is a decode that samples, and there are at most as many as the largest size."""
        num_tokens = len(step_input.token_ids)
        return (
            step_input.max_query_len == 1
            and len(step_input.logit_rows) == step_input.num_sampling_rows == num_tokens
            and num_tokens <= self._sizes[-1]
        )

    def run(self, step_input: StepInput) -> torch.Tensor:
        """Runs a step. Returns [num_rows, vocab_size] logits, valid until the next call."""
        num_rows = len(step_input.token_ids)
        size = self._sizes[bisect.bisect_left(self._sizes, num_rows)]
        self._buffers.fill(step_input, size)
        if self._kernels is not None:
            self._kernels.begin_step(self._metadata[size], step_input.host_lengths(size - num_rows))
        if size not in self._graphs:
            return self._run(size)[:num_rows]
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[:num_rows]

    def _run(self, size: int) -> torch.Tensor:
        return self._forward(self._buffers.model_input(size), self._metadata[size])


def _lengths_of_padding(num_rows: int) -> HostLengths:
    return HostLengths(np.ones(num_rows, np.int32), np.zeros(num_rows, np.int32))


def _fill(target: torch.Tensor, rows: Int32Array | Int64Array) -> None:
    target[: len(rows)].copy_(torch.from_numpy(rows), non_blocking=True)
