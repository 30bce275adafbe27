"""Computes the memory of a step beside weights and pool: runs the engine's largest step on the meta device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pagedkv.adapters.transformers.paged_model import TransformersModel
from pagedkv.integration.measure.plan.live_bytes import LiveBytes
from pagedkv.integration.measure.plan.model_facts import ModelFacts
from pagedkv.integration.measure.plan.shapes import ShapeKernels
from pagedkv.plugin.backend.executor import StepExecutor
from pagedkv.plugin.backend.graphs import DecodeBuffers
from pagedkv.plugin.backend.live_sequence import LiveSequence
from pagedkv.plugin.backend.profile import make_profile_step
from pagedkv.plugin.limits import ResolvedLimits
from pagedkv.plugin.requests import Request, RequestId, SamplingParams
from pagedkv.plugin.resolved_config import ResolvedConfig
from pagedkv.plugin.step_plan import ScheduledSequence, StepPlan

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes of a step on a GPU, in addition to weights and pool."""

    activation_bytes: int
    graph_bytes: int
    """Buffers, logits and activations of captured decodes, without CUDA's own memory."""
    is_estimate: bool
    """Whether the step could not be run on the meta device, and a formula is used instead."""


def plan_step_bytes(facts: ModelFacts, config: ResolvedConfig) -> StepBytes:
    """Computes bytes of the largest step and the graphs of a model that is not split: an upper bound for a shard."""
    block_tables = config.scheduler.max_num_sequences * -(-config.max_total_tokens // config.cache.block_size) * 4
    if facts.refusal or facts.modules is None:
        return StepBytes(_estimate(facts, config) + block_tables, 0, is_estimate=True)
    modules = facts.modules.to(config.dtype)
    try:
        activation_bytes = _run_largest_step(modules, facts, config) + block_tables
        graph_bytes = _measure_graphs(modules, facts, config)
    except NotImplementedError:
        return StepBytes(_estimate(facts, config) + block_tables, 0, is_estimate=True)
    return StepBytes(activation_bytes, graph_bytes, is_estimate=False)


def _estimate(facts: ModelFacts, config: ResolvedConfig) -> int:
    """Estimates the bytes: logits of every token, and the largest tensors of an MLP."""
    spec = facts.spec
    width = max(spec.vocab_size + 2 * spec.hidden_size, 4 * spec.hidden_size + 3 * facts.intermediate_size)
    return config.scheduler.max_step_tokens * width * config.dtype.itemsize


def _run_largest_step(modules: torch.nn.Module, facts: ModelFacts, config: ResolvedConfig) -> int:
    """Runs the largest step with short contexts: apart from block tables, a step's memory does not depend on them."""
    num_tokens = min(config.scheduler.max_step_tokens, config.max_input_tokens)
    limits = ResolvedLimits(
        max_input_tokens=num_tokens,
        max_total_tokens=num_tokens + 1,
        max_prefill_tokens=num_tokens,
        max_step_tokens=config.scheduler.max_step_tokens,
        max_num_sequences=config.scheduler.max_num_sequences,
        min_cache_tokens=2,
    )
    plan, sequences = make_profile_step(replace(config, device=torch.device("cuda")), limits)
    # Without content all tokens tie, so all would be among the best: lists of millions, but no more memory.
    without_lists = {
        id_: LiveSequence.create(_without_top_tokens(sequence.request), sequence.arrival)
        for id_, sequence in sequences.items()
    }
    return run_on_meta(modules, facts, config, plan, without_lists)


def _without_top_tokens(request: Request) -> Request:
    return replace(request, params=replace(request.params, top_n_tokens=0))


def _measure_graphs(modules: torch.nn.Module, facts: ModelFacts, config: ResolvedConfig) -> int:
    sizes = config.graph_batch_sizes
    if not sizes:
        return 0
    with LiveBytes("meta") as live:
        buffers = DecodeBuffers.create(sizes[-1], config.max_total_tokens, config.cache.block_size, META)
        buffer_bytes = live.num_bytes
        del buffers
    params = SamplingParams(max_new_tokens=1)
    ids = [RequestId(index) for index in range(sizes[-1])]
    rows = tuple(ScheduledSequence(id_, 0, 1, [0], True, 0) for id_ in ids)
    sequences = {id_: LiveSequence.create(Request(id_, [0], params), id_) for id_ in ids}
    largest_bytes = run_on_meta(modules, facts, config, StepPlan(0, rows), sequences)
    # Each graph keeps its logits; those of the largest one are part of its activations.
    kept_bytes = sum(sizes[:-1]) * facts.spec.vocab_size * config.dtype.itemsize
    return buffer_bytes + largest_bytes + kept_bytes


@torch.inference_mode()
def run_on_meta(
    modules: torch.nn.Module,
    facts: ModelFacts,
    config: ResolvedConfig,
    plan: StepPlan,
    sequences: dict[RequestId, LiveSequence],
) -> int:
    """Peak bytes of tensors of one step, with sampling. Raises NotImplementedError if content is needed."""
    spec = facts.spec.with_dtype(config.dtype)
    on_meta = replace(config, device=META)
    executor = StepExecutor(on_meta, TransformersModel(modules, spec), ShapeKernels(), [None] * len(spec.layers))
    executor.allocate(1)
    with LiveBytes("meta") as live:
        executor.run(plan, sequences)
    return live.peak_bytes
