"""Penalties on tokens that occur in the prompt or output."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch


class TokenCounts:
    """Counts how often each token occurs in one sequence, incrementally."""

    __slots__ = ("_counts", "_index", "_num_counted", "_token_ids")

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._token_ids = array("q")
        self._counts = array("q")
        self._num_counted = 0

    def update(self, token_ids: Sequence[int]) -> None:
        """Counts what has been appended to the sequence since the last call."""
        for token_id in islice(token_ids, self._num_counted, None):
            place = self._index.setdefault(token_id, len(self._index))
            if place == len(self._counts):
                self._token_ids.append(token_id)
                self._counts.append(0)
            self._counts[place] += 1
        self._num_counted = len(token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence."""
        return self._num_counted

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
    frequency_penalties: Sequence[float],
) -> None:
    """Lowers, in place, the scores of tokens that occur in prompt or output.

    First the repetition penalty p (Keskar et al., "CTRL", 2019): score < 0 ? score × p : score / p. Then the frequency
    penalty: score − penalty × count / length. 1 and 0 leave a score as it is.

    Args:
        scores: [num_rows, vocab_size] float32.
        row_indices: the rows to work on; the other arguments have one entry for each of them.
    """
    num_distinct = [len(one.token_ids) for one in counts]
    shares = [np.true_divide(one.counts, one.num_tokens) for one in counts]

    def per_token(values: Sequence[float]) -> torch.Tensor:
        repeated = np.repeat(np.asarray(values, dtype=np.float32), num_distinct)
        return torch.from_numpy(repeated).to(scores.device)

    rows = torch.from_numpy(np.repeat(np.asarray(row_indices, dtype=np.int64), num_distinct)).to(scores.device)
    token_ids = torch.from_numpy(np.concatenate([one.token_ids for one in counts])).to(scores.device)
    share = torch.from_numpy(np.concatenate(shares).astype(np.float32)).to(scores.device)
    repetition = per_token(repetition_penalties)
    picked = scores[rows, token_ids]
    picked = torch.where(picked < 0, picked * repetition, picked / repetition)
    scores[rows, token_ids] = picked - per_token(frequency_penalties) * share
