"""Penalties on tokens that occur in the prompt or output."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


class TokenCounts:
    """Counts how often each token occurs in one sequence, incrementally.

    Args:
        start: tokens at the sequence's beginning that are left out.
    """

    __slots__ = ("_counts", "_index", "_num_counted", "_start", "_token_ids")

    def __init__(self, start: int = 0) -> None:
        self._start = start
        self._index: dict[int, int] = {}
        self._token_ids = array("q")
        self._counts = array("q")
        self._num_counted = start

    def update(self, token_ids: Sequence[int]) -> None:
        """Counts what has been appended to the sequence since the last call."""
        # A slice: an iterator that skips would walk over all that was counted before, at every step.
        for token_id in token_ids[self._num_counted :]:
            place = self._index.setdefault(token_id, len(self._index))
            if place == len(self._counts):
                self._token_ids.append(token_id)
                self._counts.append(0)
            self._counts[place] += 1
        self._num_counted = len(token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens counted."""
        return self._num_counted - self._start

    @property
    def token_ids(self) -> array[int]:
        """The different tokens, in order of their first occurrence; read only."""
        return self._token_ids

    @property
    def counts(self) -> array[int]:
        """Occurrences of each of `token_ids`; read only."""
        return self._counts


def penalize_(
    scores: torch.Tensor,
    row_indices: Sequence[int],
    counts: Sequence[TokenCounts],
    repetition_penalties: Sequence[float],
    relative_frequency_penalties: Sequence[float],
) -> None:
    """Lowers, in place, the scores of tokens that occur in prompt or output.

    First the repetition penalty p (Keskar et al., "CTRL", 2019): score < 0 ? score × p : score / p. Then the relative
    frequency penalty: score − penalty × count / length. 1 and 0 leave a score as it is.

    Args:
        scores: [num_rows, vocab_size] float32.
        row_indices: the rows to work on; the other arguments have one entry for each of them.
        counts: of prompt and output.
    """
    places = _Places.create(scores, row_indices, counts)
    share = places.per_pair([np.true_divide(one.counts, one.num_tokens) for one in counts])
    repetition = places.per_row(repetition_penalties)
    picked = places.pick(scores)
    picked = torch.where(picked < 0, picked * repetition, picked / repetition)
    places.put(scores, picked - places.per_row(relative_frequency_penalties) * share)


def penalize_output_(
    scores: torch.Tensor,
    row_indices: Sequence[int],
    counts: Sequence[TokenCounts],
    frequency_penalties: Sequence[float],
    presence_penalties: Sequence[float],
) -> None:
    """Lowers, in place, the scores of tokens that occur in the output: score − frequency × count − presence.

    Args:
        scores, row_indices: as in `penalize_`.
        counts: of the output alone.
    """
    places = _Places.create(scores, row_indices, counts)
    number = places.per_pair([np.asarray(one.counts, dtype=np.float32) for one in counts])
    lowered = places.per_row(frequency_penalties) * number + places.per_row(presence_penalties)
    places.put(scores, places.pick(scores) - lowered)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where in the scores the counted tokens are: P pairs of a row and a token."""

    rows: torch.Tensor
    """[P] int64."""
    token_ids: torch.Tensor
    """[P] int64."""
    num_distinct: Sequence[int]
    """Different tokens of each row."""

    @classmethod
    def create(cls, scores: torch.Tensor, row_indices: Sequence[int], counts: Sequence[TokenCounts]) -> _Places:
        num_distinct = [len(one.token_ids) for one in counts]
        rows = np.repeat(np.asarray(row_indices, dtype=np.int64), num_distinct)
        token_ids = np.concatenate([np.asarray(one.token_ids, dtype=np.int64) for one in counts])
        device = scores.device
        return cls(torch.from_numpy(rows).to(device), torch.from_numpy(token_ids).to(device), num_distinct)

    def per_row(self, values: Sequence[float]) -> torch.Tensor:
        """[P] float32: each row's value, once for each of its tokens."""
        repeated = np.repeat(np.asarray(values, dtype=np.float32), self.num_distinct)
        return torch.from_numpy(repeated).to(self.rows.device)

    def per_pair(self, values: Sequence[npt.NDArray[np.floating]]) -> torch.Tensor:
        """[P] float32 from one array a row."""
        return torch.from_numpy(np.concatenate(values).astype(np.float32)).to(self.rows.device)

    def pick(self, scores: torch.Tensor) -> torch.Tensor:
        return scores[self.rows, self.token_ids]

    def put(self, scores: torch.Tensor, picked: torch.Tensor) -> None:
        scores[self.rows, self.token_ids] = picked
