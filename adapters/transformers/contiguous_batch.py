"""Left-padded batches: the rows that run together, and the model's input tensors for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from pagedkv.plugin.requests import Request, RequestId
from pagedkv.plugin.sampling.sampler import SamplingRow

from .contiguous_cache import CacheRows, ReservedCache, gather_rows


@dataclass(slots=True)
class LiveRow:
    """A request that the backend has accepted."""

    request: Request
    arrival: int
    """Number of requests accepted before it."""
    token_ids: list[int]
    """Prompt and generated tokens."""
    sampling: SamplingRow
    num_computed_tokens: int = 0
    admitted_s: float | None = None
    """When a step first ran it, of `time.monotonic`."""

    @classmethod
    def create(cls, request: Request, arrival: int) -> LiveRow:
        token_ids = list(request.prompt_ids)
        return cls(request, arrival, token_ids, SamplingRow.create(request.params, token_ids))

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)


@dataclass(frozen=True, slots=True)
class PaddedInput:
    """Tokens to compute, left-padded: every row's newest token is in the last column."""

    token_ids: torch.Tensor
    """[num_rows, num_new_columns] int64."""
    positions: torch.Tensor
    """[num_rows, num_new_columns] int64: position of a token in its own row; 0 for padding."""
    mask: torch.Tensor
    """[num_rows, num_columns] int64, 0 where a column holds no token of the row; old and new columns."""


@dataclass(slots=True, eq=False)
class ContiguousBatch:
    """Rows that share a cache. The cache is as wide as the longest of them."""

    rows: list[LiveRow]
    cache: ReservedCache
    device: torch.device = field(repr=False)

    def make_input(self) -> PaddedInput:
        """Returns the tokens of each row that are not computed yet: whole prompts, or one token each."""
        new_tokens = [row.token_ids[row.num_computed_tokens :] for row in self.rows]
        num_new_columns = max(len(tokens) for tokens in new_tokens)
        padded = [[0] * (num_new_columns - len(tokens)) + tokens for tokens in new_tokens]
        num_tokens = torch.tensor([len(row.token_ids) for row in self.rows], device=self.device)[:, None]
        columns = torch.arange(self.cache.num_columns + num_new_columns, device=self.device)
        positions = columns - (len(columns) - num_tokens)
        return PaddedInput(
            token_ids=torch.tensor(padded, device=self.device),
            positions=positions[:, -num_new_columns:].clamp(min=0),
            mask=(positions >= 0).long(),
        )

    def mark_computed(self) -> None:
        """Records that the model ran over `make_input`. Call it before new tokens are appended."""
        for row in self.rows:
            row.num_computed_tokens = len(row.token_ids)


def join_rows(batches: Sequence[ContiguousBatch], ids: Collection[RequestId]) -> ContiguousBatch | None:
    """Joins the rows of some ids into one batch; None if there are none. The given batches can't be used after that."""
    if len(batches) == 1 and all(row.id in ids for row in batches[0].rows):
        return batches[0]
    return _gather([(batch, _find_rows(batch, ids, is_wanted=True)) for batch in batches], is_last_use=True)


def split_rest(batches: Sequence[ContiguousBatch], ids: Collection[RequestId]) -> list[ContiguousBatch]:
    """Returns batches of the rows that `join_rows` with the same arguments would leave out. Call it before that."""
    rests = [_gather([(batch, _find_rows(batch, ids, is_wanted=False))], is_last_use=False) for batch in batches]
    return [rest for rest in rests if rest is not None]


def _find_rows(batch: ContiguousBatch, ids: Collection[RequestId], *, is_wanted: bool) -> list[int]:
    return [index for index, row in enumerate(batch.rows) if (row.id in ids) is is_wanted]


def _gather(parts: Sequence[tuple[ContiguousBatch, list[int]]], *, is_last_use: bool) -> ContiguousBatch | None:
    parts = [(batch, indices) for batch, indices in parts if indices]
    if not parts:
        return None
    rows = [batch.rows[index] for batch, indices in parts for index in indices]
    device = parts[0][0].device
    sources = [CacheRows(batch.cache, torch.tensor(indices, device=device), is_last_use) for batch, indices in parts]
    return ContiguousBatch(rows, gather_rows(sources, max(row.num_computed_tokens for row in rows)), device)
