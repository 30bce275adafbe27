"""torch's own attention for whole prompts, whose keys and values are gathered from their blocks first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from pagedkv.plugin.attention_metadata import AttentionMetadata, AttentionOptions

MIN_DENSE_TOKENS = 256
"""Of a prompt."""


def find_dense_rows(metadata: AttentionMetadata, options: AttentionOptions) -> list[tuple[int, int, int]]:
    """Rows of the batch that are whole prompts without a context before them, if their attention is a plain one.

    Returns:
        (row, its first query, its number of tokens) of each.
    """
    has_options = options.softcap is not None or options.sinks is not None or options.alibi_slopes is not None
    if metadata.max_query_len < MIN_DENSE_TOKENS or has_options or options.sliding_window is not None:
        return []
    starts, seq_lens = metadata.cu_seqlens_q.tolist(), metadata.seq_lens.tolist()
    return [
        (row, starts[row], seq_len)
        for row, seq_len in enumerate(seq_lens)
        if seq_len == starts[row + 1] - starts[row] and seq_len >= MIN_DENSE_TOKENS
    ]


def without_rows(metadata: AttentionMetadata, rows: Sequence[int]) -> AttentionMetadata:
    """The same batch with some of its rows as padding."""
    seq_lens = metadata.seq_lens.clone()
    seq_lens[list(rows)] = 0
    return replace(metadata, seq_lens=seq_lens)


def find_slots(metadata: AttentionMetadata, row: int, num_tokens: int, block_size: int) -> torch.Tensor:
    """[num_tokens] int64 slots of a row's tokens."""
    tokens = torch.arange(num_tokens)
    return metadata.block_table[row][tokens // block_size].long() * block_size + tokens % block_size


def attend_prompt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of a whole prompt.

    Args:
        q: [num_tokens, num_heads, head_dim].
        k: [num_tokens, num_kv_heads, head_dim], of any dtype, as v: with v_head_dim.

    Returns:
        [num_tokens, num_heads, v_head_dim] in the dtype of q.
    """
    queries, keys, values = (x.to(q.dtype).transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
