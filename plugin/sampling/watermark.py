"""Watermarks in generated text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_HASH_KEY = 15485863


class Watermark:
    """Favours a "green" part of the vocabulary that the previous token determines, so that the text can be recognized.

    Kirchenbauer et al., "A Watermark for Large Language Models" (2023), soft variant with a context of one token.

    Args:
        vocab_size: tokens of the model.
        gamma: part of the vocabulary that is green, between 0 and 1.
        delta: what is added to the scores of green tokens.
    """

    def __init__(self, vocab_size: int, gamma: float, delta: float) -> None:
        self._vocab_size = vocab_size
        self._num_green = int(vocab_size * gamma)
        self._delta = delta
        # Always on the CPU: generators differ between devices, and a watermark must not.
        self._generator = torch.Generator()

    def green_ids(self, previous_id: int) -> torch.Tensor:
        """[int(vocab_size × gamma)] int64 on the CPU: the tokens favoured after `previous_id`, in random order."""
        self._generator.manual_seed(_HASH_KEY * previous_id)
        return torch.randperm(self._vocab_size, generator=self._generator)[: self._num_green]

    def favour_(self, scores: torch.Tensor, row_indices: Sequence[int], previous_ids: Sequence[int]) -> None:
        """Adds delta, in place, to the green tokens of some rows.

        Args:
            scores: [num_rows, vocab_size] float32.
            row_indices: the rows to work on.
            previous_ids: the last token of prompt and output of each of them.
        """
        green = torch.stack([self.green_ids(previous_id) for previous_id in previous_ids]).to(scores.device)
        rows = torch.tensor(row_indices, device=scores.device).unsqueeze(-1)
        scores[rows, green] += self._delta
