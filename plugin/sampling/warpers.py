"""Warpers, which flatten or cut the distribution that tokens are drawn from. All work in place, row by row.

Throughout, scores are [num_rows, vocab_size] float32 and a token that is cut gets −inf. Tokens that tie with the last
one kept are kept too, so that what is kept does not depend on a sort's order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_NUM_CANDIDATES = (256, 4096)
"""Numbers of best tokens to try before the whole vocabulary, which is slow to sort. Few tokens usually suffice."""


def divide_by_temperature_(scores: torch.Tensor, temperatures: Sequence[float]) -> None:
    """Divides each row by its temperature, any positive number.

    The best score becomes 0 first, which changes no probability and keeps tiny temperatures from overflowing.
    """
    limits = torch.finfo(scores.dtype)
    divisors = torch.tensor(temperatures, dtype=torch.float64).clamp_(limits.tiny, limits.max)
    scores.sub_(scores.amax(-1, keepdim=True))
    scores.div_(divisors.to(scores.device, scores.dtype).unsqueeze(-1))


def keep_min_p_(scores: torch.Tensor, min_p: Sequence[float]) -> None:
    """Keeps the tokens whose probability is at least `min_p` (above 0) × that of the row's best.

    Min-p sampling: Nguyen et al., "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs" (2024).
    """
    distances = torch.tensor(min_p, dtype=torch.float64).log_().to(scores.device, scores.dtype).unsqueeze(-1)
    scores.masked_fill_(scores < scores.amax(-1, keepdim=True) + distances, -torch.inf)


def keep_top_k_(scores: torch.Tensor, top_k: Sequence[int]) -> None:
    """Keeps the `top_k` (at least 1) best tokens of each row."""
    ranks = torch.tensor([min(k, scores.shape[-1]) for k in top_k])
    best = scores.topk(int(ranks.max()), dim=-1).values
    worst_kept = best.gather(-1, (ranks - 1).unsqueeze(-1).to(scores.device))
    scores.masked_fill_(scores < worst_kept, -torch.inf)


def keep_top_p_(scores: torch.Tensor, top_p: Sequence[float]) -> None:
    """Keeps the fewest best tokens whose probabilities sum to `top_p` at least.

    Nucleus sampling: Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020).
    """
    _keep_mass_(scores, scores.neg(), scores.softmax(-1), top_p)


def keep_typical_(scores: torch.Tensor, typical_p: Sequence[float]) -> None:
    """Keeps the tokens whose information is closest to the entropy, until their probabilities sum to `typical_p`.

    Locally typical sampling: Meister et al. (2023).
    """
    logprobs = scores.log_softmax(-1)
    probs = logprobs.exp()
    entropy = -(logprobs * probs).nansum(-1, keepdim=True)  # a token that was cut is −inf × 0
    _keep_mass_(scores, logprobs.add_(entropy).abs_(), probs, typical_p)


def _keep_mass_(scores: torch.Tensor, keys: torch.Tensor, probs: torch.Tensor, masses: Sequence[float]) -> None:
    """Keeps the tokens of smallest key until their probabilities sum to each row's mass; cuts the others."""
    mass = torch.tensor(masses, dtype=torch.float64, device=scores.device).unsqueeze(-1)
    last_keys = torch.empty_like(keys[:, :1])
    rows = torch.arange(len(scores), device=scores.device)
    vocab_size = scores.shape[-1]
    for num_candidates in (*(n for n in _NUM_CANDIDATES if n < vocab_size), vocab_size):
        candidates = keys[rows].topk(num_candidates, dim=-1, largest=False)
        sums = probs[rows].gather(-1, candidates.indices).cumsum(-1, dtype=torch.float64)
        last = (sums < mass[rows]).sum(-1, keepdim=True).clamp_(max=num_candidates - 1)
        last_keys[rows] = candidates.values.gather(-1, last)
        rows = rows[sums[:, -1] < mass[rows, 0]]
        if not len(rows):
            break
    scores.masked_fill_(keys > last_keys, -torch.inf)
