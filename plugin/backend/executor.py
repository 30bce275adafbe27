"""Runs a plan: copies blocks, runs the model over the batch, samples. Holds the cache's memory; decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from pagedkv.plugin.abilities import PreparesSteps
from pagedkv.plugin.attention_metadata import AttentionContext, AttentionMetadata
from pagedkv.plugin.backend.graphs import PaddedDecodes
from pagedkv.plugin.backend.live_sequence import LiveSequence
from pagedkv.plugin.backend.step_input import StepInput, build_step_input, num_logprob_tokens
from pagedkv.plugin.interface import AttentionKernels, KVStorage, ModelAdapter, ModelInput
from pagedkv.plugin.kv_scales import LayerScales
from pagedkv.plugin.requests import RequestId
from pagedkv.plugin.resolved_config import ResolvedConfig
from pagedkv.plugin.sampling.prefill_logprobs import prefill_logprobs
from pagedkv.plugin.sampling.sampler import SampledToken, Sampler
from pagedkv.plugin.step_plan import StepPlan

logger = logging.getLogger(__name__)

Sequences = Mapping[RequestId, LiveSequence]


class StepExecutor:
    """Runs the steps of one backend, with its model, kernels and blocks' memory."""

    def __init__(
        self,
        config: ResolvedConfig,
        model: ModelAdapter,
        kernels: AttentionKernels,
        static_scales: Sequence[LayerScales | None],
    ) -> None:
        self._device = config.device
        self._block_size = config.cache.block_size
        self._kv_dtype = config.cache.kv_dtype
        self._model = model
        self._kernels = kernels
        self._sampler = Sampler(model.spec.vocab_size, config.device, model.spec.eos_token_ids)
        self._static_scales = static_scales
        self._storage: Sequence[KVStorage] = ()
        self._padded_decodes: PaddedDecodes | None = None

    @property
    def bytes_per_block(self) -> int:
        """KV bytes of a block over all layers."""
        return self._model.spec.bytes_per_block(self._block_size, self._kv_dtype)

    def allocate(self, num_blocks: int) -> None:
        """Replaces the blocks' memory, and drops the graphs captured over the old one. 0 blocks frees it."""
        self._storage = ()
        self._padded_decodes = None
        if num_blocks:
            specs = [layer.cache_spec(self._block_size, self._kv_dtype) for layer in self._model.spec.layers]
            self._storage = [
                replace(self._kernels.allocate(spec, num_blocks), static_scales=scales)
                for spec, scales in zip(specs, self._static_scales, strict=True)
            ]

    def prepare_decodes(self, batch_sizes: Sequence[int], max_seq_len: int) -> None:
        """Makes decode steps up to the largest of `batch_sizes` run from fixed buffers over the allocated blocks.

        On a GPU they run as CUDA graphs. A model or kernels that can't be captured run without; the log says so."""
        if not batch_sizes or not self._kernels.can_capture_graphs:
            return
        prepared = self._kernels if isinstance(self._kernels, PreparesSteps) else None
        decodes = PaddedDecodes(self._forward, batch_sizes, max_seq_len, self._block_size, self._device, prepared)
        if self._device.type == "cuda":
            try:
                decodes.capture()
            except RuntimeError as error:
                logger.warning("decode steps run without CUDA graphs, capturing failed: %s", error)
                return
        self._padded_decodes = decodes

    @property
    def has_padded_decodes(self) -> bool:
        """Whether decode steps run from fixed buffers."""
        return self._padded_decodes is not None

    def drop_padded_decodes(self) -> None:
        self._padded_decodes = None

    def run(self, plan: StepPlan, sequences: Sequences) -> dict[RequestId, SampledToken]:
        """Runs a plan with rows. Returns a token for each row that is its sequence's last chunk.

        Adds log-probabilities of prompts to the sequences that request them.
        """
        if plan.copies:
            for storage in self._storage:
                self._kernels.copy_blocks(storage, plan.copies)
        step_input = build_step_input(plan, sequences, self._block_size)
        if self._padded_decodes and self._padded_decodes.can_run(step_input):
            logits = self._padded_decodes.run(step_input)
        else:
            metadata = step_input.metadata(self._device)
            if isinstance(self._kernels, PreparesSteps):
                self._kernels.begin_step(metadata, step_input.host_lengths())
            logits = self._forward(step_input.model_input(self._device), metadata)
        if step_input.next_token_ids.size:
            _collect_prefill_logprobs(plan, sequences, step_input, logits)
        return self._sample(plan, sequences, logits[: step_input.num_sampling_rows])

    def _forward(self, batch: ModelInput, metadata: AttentionMetadata) -> torch.Tensor:
        return self._model.forward(batch, AttentionContext(self._kernels, self._storage, metadata))

    def _sample(self, plan: StepPlan, sequences: Sequences, logits: torch.Tensor) -> dict[RequestId, SampledToken]:
        ids = [row.id for row in plan.scheduled if row.is_last_chunk]
        if not ids:
            return {}
        sampled = self._sampler.sample(logits, [sequences[id_].sampling for id_ in ids])
        return dict(zip(ids, sampled, strict=True))


def _collect_prefill_logprobs(
    plan: StepPlan, sequences: Sequences, step_input: StepInput, logits: torch.Tensor
) -> None:
    next_token_ids = torch.from_numpy(step_input.next_token_ids).to(logits.device)
    logprobs = prefill_logprobs(logits[step_input.num_sampling_rows :], next_token_ids).tolist()
    first = 0
    for row in plan.scheduled:
        sequence = sequences[row.id]
        if sequence.wants_prefill_logprobs:
            last = first + num_logprob_tokens(row, sequence)
            sequence.extend_prefill_logprobs(row.start, logprobs[first:last])
            first = last
