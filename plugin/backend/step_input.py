"""Builds the tensors of the model and the kernels from a step's plan. Loops over sequences, never over tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.plugin.abilities import HostLengths
from pagedkv.plugin.attention_metadata import AttentionMetadata
from pagedkv.plugin.backend.live_sequence import LiveSequence
from pagedkv.plugin.interface import ModelInput
from pagedkv.plugin.requests import RequestId
from pagedkv.plugin.step_plan import ScheduledSequence, StepPlan

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_NO_TOKENS: Int64Array = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class StepInput:
    """A step's batch on the host. T tokens, B sequences, S of which sample; P prompt tokens want a log-probability."""

    token_ids: Int64Array
    """[T]."""
    positions: Int64Array
    """[T]."""
    cu_seqlens_q: Int32Array
    """[B + 1]."""
    seq_lens: Int32Array
    """[B]."""
    block_table: Int32Array
    """[B, max_blocks]; zeros past a row's last block."""
    slot_mapping: Int64Array
    """[T]."""
    logit_rows: Int64Array
    """[S + P]: the last token of each row that samples, then the tokens before each wanted log-probability."""
    num_sampling_rows: int
    next_token_ids: Int64Array
    """[P]: the known tokens that follow the last P of `logit_rows`."""
    max_query_len: int
    num_decodes: int

    def model_input(self, device: torch.device) -> ModelInput:
        return ModelInput(
            to_device(self.token_ids, device), to_device(self.positions, device), to_device(self.logit_rows, device)
        )

    def host_lengths(self, num_padding_rows: int = 0) -> HostLengths:
        """The rows' lengths, followed by those of rows that only pad: one query token, no context."""
        query_lens = np.diff(self.cu_seqlens_q)
        return HostLengths(
            np.pad(query_lens, (0, num_padding_rows), constant_values=1), np.pad(self.seq_lens, (0, num_padding_rows))
        )

    def metadata(self, device: torch.device) -> AttentionMetadata:
        return AttentionMetadata(
            cu_seqlens_q=to_device(self.cu_seqlens_q, device),
            seq_lens=to_device(self.seq_lens, device),
            block_table=to_device(self.block_table, device),
            slot_mapping=to_device(self.slot_mapping, device),
            max_query_len=self.max_query_len,
            max_seq_len=int(self.seq_lens.max()),
            num_decodes=self.num_decodes,
        )


def build_step_input(plan: StepPlan, sequences: Mapping[RequestId, LiveSequence], block_size: int) -> StepInput:
    """Builds the batch of a plan that is not empty.

    >>> from pagedkv.plugin.backend.live_sequence import LiveSequence
    >>> from pagedkv.plugin.requests import Request, RequestId, SamplingParams
    >>> row = ScheduledSequence(RequestId(7), 4, 2, block_table=[9, 3], is_last_chunk=True, num_cached_tokens=0)
    >>> request = Request(RequestId(7), [10, 11, 12, 13, 14, 15], SamplingParams())
    >>> step = build_step_input(StepPlan(0, (row,)), {row.id: LiveSequence.create(request, 0)}, block_size=4)
    >>> step.token_ids.tolist(), step.positions.tolist(), step.slot_mapping.tolist()
    ([14, 15], [4, 5], [12, 13])
    """
    rows = plan.scheduled
    num_rows = len(rows)
    starts = np.fromiter((row.start for row in rows), np.int64, num_rows)
    lengths = np.fromiter((row.num_tokens for row in rows), np.int64, num_rows)
    cu_seqlens_q = np.zeros(num_rows + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens_q[1:])
    token_ids = _gather_token_ids(rows, sequences)
    # A token's position in its sequence is its index in the batch plus an offset that is constant for a row.
    row_of_token = np.repeat(np.arange(num_rows), lengths)
    positions = np.arange(len(token_ids), dtype=np.int64) + (starts - cu_seqlens_q[:-1])[row_of_token]
    block_table = _gather_block_tables(rows)
    blocks = block_table[row_of_token, positions // block_size].astype(np.int64)
    logprob_rows, next_token_ids = _find_logprob_rows(rows, sequences, cu_seqlens_q)
    samples = np.fromiter((row.is_last_chunk for row in rows), np.bool_, num_rows)
    sampling_rows = cu_seqlens_q[1:][samples].astype(np.int64) - 1
    num_single = int(np.argmax(lengths != 1)) if (lengths != 1).any() else num_rows
    return StepInput(
        token_ids=token_ids,
        positions=positions,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=(starts + lengths).astype(np.int32),
        block_table=block_table,
        slot_mapping=blocks * block_size + positions % block_size,
        logit_rows=np.concatenate([sampling_rows, logprob_rows]),
        num_sampling_rows=len(sampling_rows),
        next_token_ids=next_token_ids,
        max_query_len=int(lengths.max()),
        num_decodes=num_single,
    )


def _gather_token_ids(rows: tuple[ScheduledSequence, ...], sequences: Mapping[RequestId, LiveSequence]) -> Int64Array:
    token_ids: list[int] = []
    for row in rows:
        known = sequences[row.id].token_ids
        if row.num_tokens == 1:
            token_ids.append(known[row.start])
        else:
            token_ids += known[row.start : row.start + row.num_tokens]
    return np.array(token_ids, np.int64)


def _gather_block_tables(rows: tuple[ScheduledSequence, ...]) -> Int32Array:
    table = np.zeros((len(rows), max(len(row.block_table) for row in rows)), np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row.block_table)] = row.block_table
    return table


def _find_logprob_rows(
    rows: tuple[ScheduledSequence, ...], sequences: Mapping[RequestId, LiveSequence], cu_seqlens_q: Int32Array
) -> tuple[Int64Array, Int64Array]:
    logit_rows, next_ids = [_NO_TOKENS], [_NO_TOKENS]
    if not any(sequences[row.id].wants_prefill_logprobs for row in rows):
        return _NO_TOKENS, _NO_TOKENS
    for row, first in zip(rows, cu_seqlens_q.tolist(), strict=False):
        num_wanted = num_logprob_tokens(row, sequences[row.id])
        if num_wanted:
            logit_rows.append(np.arange(first, first + num_wanted, dtype=np.int64))
            known = sequences[row.id].token_ids
            next_ids.append(np.array(known[row.start + 1 : row.start + 1 + num_wanted], np.int64))
    return np.concatenate(logit_rows), np.concatenate(next_ids)


def num_logprob_tokens(row: ScheduledSequence, sequence: LiveSequence) -> int:
    """Counts the row's tokens that are followed by a prompt token, and so give its log-probability."""
    if not sequence.wants_prefill_logprobs:
        return 0
    return min(row.num_tokens, sequence.num_prompt_tokens - 1 - row.start)


def to_device(array: Int32Array | Int64Array, device: torch.device) -> torch.Tensor:
    """Copies an array to a tensor on the device; on a GPU asynchronously."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
