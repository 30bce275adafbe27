"""Log-probabilities of a prompt's own tokens."""

from __future__ import annotations

import torch

from pagedkv.plugin.sampling.chunks import max_rows_at_once


def prefill_logprobs(logits: torch.Tensor, next_token_ids: torch.Tensor) -> torch.Tensor:
    """Log-probability of the token that follows each position. Works in chunks, without a second copy of the logits.

    Args:
        logits: [num_tokens, vocab_size], any float dtype.
        next_token_ids: [num_tokens] int64, the token after each position, on the same device.

    Returns:
        [num_tokens] float32: the log-softmax of each row at its next token.
    """
    result = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    num_rows = max_rows_at_once(logits.shape[-1], logits.device)
    for start in range(0, len(logits), num_rows):
        scores = logits[start : start + num_rows].float()
        next_ids = next_token_ids[start : start + num_rows].unsqueeze(-1)
        result[start : start + num_rows] = scores.gather(-1, next_ids).squeeze(-1) - scores.logsumexp(-1)
    return result
