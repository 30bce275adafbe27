"""The model's own best tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pagedkv.plugin.requests import TokenLogprob


def find_top_tokens(logits: torch.Tensor, num_top_tokens: Sequence[int]) -> list[tuple[TokenLogprob, ...]]:
    """The best tokens of each row, best first, equal scores by id; ties with the last one are included.

    Args:
        logits: [num_rows, vocab_size] as the model gave them, any float dtype.
        num_top_tokens: how many are wanted of each row, at least 1; at most the vocabulary is given.
    """
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    ranks = torch.tensor([min(n, logits.shape[-1]) for n in num_top_tokens])
    best = logprobs.topk(int(ranks.max()), dim=-1).values
    worst_wanted = best.gather(-1, (ranks - 1).unsqueeze(-1).to(logits.device))
    places = (logprobs >= worst_wanted).nonzero(as_tuple=True)
    rows, token_ids, values = (part.cpu().numpy() for part in (*places, logprobs[places]))
    order = np.lexsort((token_ids, -values, rows))
    tokens = [TokenLogprob(*pair) for pair in zip(token_ids[order].tolist(), values[order].tolist(), strict=True)]
    ends = np.bincount(rows, minlength=len(logits)).cumsum().tolist()
    return [tuple(tokens[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
