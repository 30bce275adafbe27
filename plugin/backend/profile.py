"""Runs the largest step once before the pool is sized, to measure the memory that a step needs beside the pool."""

from __future__ import annotations

from dataclasses import replace

import torch

from pagedkv.plugin.backend.executor import StepExecutor
from pagedkv.plugin.backend.live_sequence import LiveSequence
from pagedkv.plugin.limits import ResolvedLimits
from pagedkv.plugin.requests import WORST_SAMPLING, Request, RequestId
from pagedkv.plugin.resolved_config import ResolvedConfig
from pagedkv.plugin.step_plan import ScheduledSequence, StepPlan

CPU_STEP_TOKENS = 64
"""Tokens of this step on a CPU. There activations use the memory that the pool leaves, so a small step that prepares
the kernels is enough."""

PROFILED_SAMPLING = replace(WORST_SAMPLING, max_new_tokens=1, prefill_logprobs=True)


def measure_activation_bytes(executor: StepExecutor, config: ResolvedConfig, limits: ResolvedLimits) -> int:
    """Runs the largest step that the scheduler may plan and measures its memory. Then captures the CUDA graphs, if any.

    The step is a prompt chunk with log-probabilities of every token beside a full batch of running sequences, all
    sampled with every option on. All its sequences share a few blocks; its results are dropped.

    Returns:
        Peak bytes beside weights and pool, graphs included, on a GPU; 0 on a CPU.
    """
    plan, sequences = make_profile_step(config, limits)
    executor.allocate(max(len(row.block_table) for row in plan.scheduled))
    try:
        if config.device.type != "cuda":
            executor.run(plan, sequences)
            return 0
        return _measure_step(executor, plan, sequences, config.device) + _measure_graphs(executor, config, limits)
    finally:
        executor.allocate(0)
        if config.device.type == "cuda":
            torch.cuda.empty_cache()


def _measure_step(
    executor: StepExecutor, plan: StepPlan, sequences: dict[RequestId, LiveSequence], device: torch.device
) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    executor.run(plan, sequences)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _measure_graphs(executor: StepExecutor, config: ResolvedConfig, limits: ResolvedLimits) -> int:
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info(config.device)
    executor.prepare_decodes(config.graph_batch_sizes, limits.max_total_tokens)
    after, _ = torch.cuda.mem_get_info(config.device)
    return max(0, before - after)


def make_profile_step(config: ResolvedConfig, limits: ResolvedLimits) -> tuple[StepPlan, dict[RequestId, LiveSequence]]:
    """Makes the plan of the largest step, and its sequences."""
    is_measured = config.device.type == "cuda"
    num_step_tokens = limits.max_step_tokens
    if not is_measured:
        num_step_tokens = min(num_step_tokens, CPU_STEP_TOKENS)
    num_decodes = min(config.scheduler.max_num_sequences - 1, num_step_tokens // 2)
    num_prompt_tokens = min(num_step_tokens - num_decodes, limits.max_input_tokens)
    num_context_tokens = limits.max_total_tokens if is_measured else num_prompt_tokens
    shapes = [(num_context_tokens, 1)] * num_decodes + [(num_prompt_tokens, num_prompt_tokens)]
    sequences: dict[RequestId, LiveSequence] = {}
    rows = []
    for index, (num_known_tokens, num_tokens) in enumerate(shapes):
        id_ = RequestId(index)
        sequences[id_] = LiveSequence.create(Request(id_, [0] * num_known_tokens, PROFILED_SAMPLING), index)
        block_table = range(-(-num_known_tokens // config.cache.block_size))
        rows.append(ScheduledSequence(id_, num_known_tokens - num_tokens, num_tokens, block_table, True, 0))
    return StepPlan(0, tuple(rows)), sequences
