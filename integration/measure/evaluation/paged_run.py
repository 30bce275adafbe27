"""Runs a model over a paged cache on known tokens: without scheduler and sampling, all rows at the same position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pagedkv.plugin.attention_metadata import AttentionContext, AttentionMetadata
from pagedkv.plugin.errors import UnsupportedError
from pagedkv.plugin.features import find_layer_faults
from pagedkv.plugin.interface import AttentionKernels, KVStorage, ModelAdapter, ModelInput
from pagedkv.plugin.kv_dtypes import KVDtype

StaticScales = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""k_scale and v_scale of each layer: [num_kv_heads] float32."""


class PagedRun:
    """Runs `num_rows` sequences of up to `max_tokens` tokens, each in its own random blocks of the pool."""

    def __init__(
        self,
        model: ModelAdapter,
        kernels: AttentionKernels,
        kv_dtype: KVDtype,
        *,
        num_rows: int,
        max_tokens: int,
        block_size: int,
        device: torch.device,
        static_scales: StaticScales | None = None,
    ) -> None:
        """Allocates the cache. Raises UnsupportedError, with reasons, if the kernels don't support this KV dtype."""
        self._model, self._kernels = model, kernels
        self._block_size, self._device = block_size, device
        blocks_per_row = -(-max_tokens // block_size)
        num_blocks = num_rows * blocks_per_row
        ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
        self._block_table = ids.view(num_rows, blocks_per_row).int().to(device)
        self._storage = self._allocate(kv_dtype, num_blocks, static_scales)

    @property
    def kernels_name(self) -> str:
        return self._kernels.name

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, start: int, *, has_all_logits: bool = True) -> torch.Tensor:
        """Computes the next tokens of every row.

        Args:
            token_ids: [num_rows, num_tokens] int64; one token a row is a decode step.
            start: number of tokens of each row that were computed before.
            has_all_logits: False computes only the last token's logits.

        Returns:
            [num_rows, num_tokens or 1, vocab_size] float32 logits.
        """
        num_rows, num_tokens = token_ids.shape
        positions = torch.arange(start, start + num_tokens, device=self._device)
        logit_rows = torch.arange(num_rows * num_tokens, device=self._device)
        if not has_all_logits:
            logit_rows = logit_rows[num_tokens - 1 :: num_tokens]
        batch = ModelInput(token_ids.reshape(-1).to(self._device), positions.repeat(num_rows), logit_rows)
        context = AttentionContext(self._kernels, self._storage, self._metadata(num_rows, positions))
        return self._model.forward(batch, context).float().view(num_rows, -1, self._model.spec.vocab_size)

    def _metadata(self, num_rows: int, positions: torch.Tensor) -> AttentionMetadata:
        num_tokens, end = len(positions), int(positions[-1]) + 1
        table = self._block_table[:num_rows]
        slots = table[:, positions // self._block_size].long() * self._block_size + positions % self._block_size
        return AttentionMetadata(
            cu_seqlens_q=torch.arange(num_rows + 1, dtype=torch.int32, device=self._device) * num_tokens,
            seq_lens=torch.full((num_rows,), end, dtype=torch.int32, device=self._device),
            block_table=table,
            slot_mapping=slots.flatten(),
            max_query_len=num_tokens,
            max_seq_len=end,
            num_decodes=num_rows if num_tokens == 1 else 0,
        )

    def _allocate(self, kv_dtype: KVDtype, num_blocks: int, static_scales: StaticScales | None) -> list[KVStorage]:
        spec = self._model.spec
        reasons = {
            reason
            for layer in spec.layers
            for reason in find_layer_faults(
                self._kernels, layer, layer.cache_spec(self._block_size, kv_dtype), spec.dtype
            )
        }
        if reasons:
            raise UnsupportedError(f"the KV dtype {kv_dtype.name} can't be run: {'; '.join(sorted(reasons))}")
        storage = [self._kernels.allocate(x.cache_spec(self._block_size, kv_dtype), num_blocks) for x in spec.layers]
        if static_scales is None:
            return storage
        return [replace(x, static_scales=scales) for x, scales in zip(storage, static_scales, strict=True)]
