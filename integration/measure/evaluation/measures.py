"""Accuracy measures of quantized keys and values, against a run whose keys and values are not quantized."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Means over tokens, in comparison with the unquantized run on the same tokens."""

    num_tokens: int
    ppl: float
    """Perplexity: exp of the mean negative log-likelihood."""
    ppl_ratio: float
    kl: float
    """Mean Kullback-Leibler divergence KL(unquantized ‖ quantized) of the next token's distribution, in nats."""
    top1: float
    """Share of tokens for which both runs have the same most likely next token."""


@dataclass(slots=True)
class AccuracySums:
    """Adds up tokens; sums are float64."""

    num_tokens: int = 0
    nll: float = 0.0
    unquantized_nll: float = 0.0
    kl: float = 0.0
    num_same_top: int = 0

    def add(self, unquantized: torch.Tensor, quantized: torch.Tensor, next_ids: torch.Tensor) -> None:
        """Adds log-probabilities of both runs, [N, vocab_size] float32, and the real next tokens, [N] int64."""
        places = next_ids[:, None]
        self.num_tokens += len(next_ids)
        self.nll -= quantized.gather(1, places).double().sum().item()
        self.unquantized_nll -= unquantized.gather(1, places).double().sum().item()
        self.kl += (unquantized.exp() * (unquantized - quantized)).sum(-1).double().sum().item()
        self.num_same_top += int((unquantized.argmax(-1) == quantized.argmax(-1)).sum())

    def merge(self, other: AccuracySums) -> AccuracySums:
        return AccuracySums(
            self.num_tokens + other.num_tokens,
            self.nll + other.nll,
            self.unquantized_nll + other.unquantized_nll,
            self.kl + other.kl,
            self.num_same_top + other.num_same_top,
        )

    def means(self) -> Accuracy:
        """Returns the means. Needs at least one token."""
        assert self.num_tokens
        return Accuracy(
            self.num_tokens,
            math.exp(self.nll / self.num_tokens),
            math.exp((self.nll - self.unquantized_nll) / self.num_tokens),
            self.kl / self.num_tokens,
            self.num_same_top / self.num_tokens,
        )
