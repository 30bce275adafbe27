"""What scheduling costs without a model: `python integration/measure/micro/scheduling.py [--json] [--model DIR]`.

- One step of 64 decoding sequences: of scheduler and cache manager alone, and of the whole paged backend over a model
  that returns constant logits at once. Held against 5 % of a 40 ms step.
- Admission of a 4096-token prompt with its prefix lookup, found in the cache and not. Held against 3 ms.
- Prefix caching where nothing is ever found: time per token that it adds, and the throughput at which this would be
  1 %. With `--model`, also the share of that model's own throughput on this machine, held against 1 %.

All figures are medians, after a warm-up, with seeded token ids.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, ClassVar

import torch

from pagedkv.plugin.attention_metadata import AttentionContext
from pagedkv.plugin.backend.paged import PagedBackend
from pagedkv.plugin.config import load_config
from pagedkv.plugin.errors import UnsupportedError
from pagedkv.plugin.features import INTERFACE_VERSION, InterfaceVersion
from pagedkv.plugin.interface import (
    CacheManager,
    ModelInput,
    Scheduler,
    Tokenizer,
    WarmupLimits,
)
from pagedkv.plugin.model_spec import AttentionSpec, ModelSpec
from pagedkv.plugin.registry import CACHE_MANAGERS, KERNELS, SCHEDULERS, load_plugin
from pagedkv.plugin.requests import CacheNamespace, Request, RequestId, SamplingParams
from pagedkv.plugin.resolved_config import ModelSettings, ResolvedConfig, SchedulerSettings, resolve_config
from pagedkv.plugin.step_plan import NewSequence

if TYPE_CHECKING:
    from typing_extensions import Self

BLOCK_SIZE = 16
NUM_SEQUENCES = 64
CONTEXT_TOKENS = 512
PROMPT_TOKENS = 4096
MAX_STEP_TOKENS = 8192
VOCAB_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str
    bar: float | None = None
    """Largest value allowed; None is only reported."""

    @property
    def is_met(self) -> bool:
        return self.bar is None or self.value <= self.bar


class ConstantModel:
    """A model adapter that costs nothing: the same logits for every row, nothing stored, nothing attended."""

    interface_version: ClassVar[InterfaceVersion] = INTERFACE_VERSION
    spec = ModelSpec(
        architecture="ConstantModel",
        dtype=torch.float32,
        layers=(AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=8, v_head_dim=8),),
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        max_position_tokens=2 * PROMPT_TOKENS,
        eos_token_ids=(),
        bos_token_id=None,
        pad_token_id=None,
    )

    def __init__(self) -> None:
        self._logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

    @classmethod
    def describe(cls, settings: ModelSettings) -> ModelSpec:
        return cls.spec

    @classmethod
    def load_tokenizer(cls, settings: ModelSettings) -> Tokenizer:
        raise UnsupportedError("the constant model has no text")

    @classmethod
    def load(cls, config: ResolvedConfig, device: torch.device) -> Self:
        return cls()

    def forward(self, batch: ModelInput, attention: AttentionContext) -> torch.Tensor:
        return self._logits.expand(len(batch.logit_rows), -1)


class Prompts:
    """Seeded prompts, no two of which have a block in common."""

    def __init__(self) -> None:
        self._random = random.Random(0)  # noqa: S311 # token ids for a benchmark

    def next(self, num_tokens: int) -> list[int]:
        return self._random.choices(range(VOCAB_SIZE), k=num_tokens)


def make_scheduler(num_blocks: int, has_prefix_cache: bool = True) -> tuple[Scheduler, CacheManager]:
    settings = SchedulerSettings("continuous", MAX_STEP_TOKENS, NUM_SEQUENCES, BLOCK_SIZE)
    cache = load_plugin(CACHE_MANAGERS, "paged").create(num_blocks, BLOCK_SIZE, has_prefix_cache=has_prefix_cache)
    scheduler = load_plugin(SCHEDULERS, settings.name).create(settings, cache, num_blocks * BLOCK_SIZE)
    return scheduler, cache


def run_step(
    scheduler: Scheduler, token_ids: Mapping[RequestId, list[int]], max_tokens: dict[RequestId, int] | None = None
) -> int:
    """Schedules and commits a step; sampled tokens are made up.

    Args:
        token_ids: of each sequence; sampled tokens are appended.
        max_tokens: length at which a sequence ends; None ends none.

    Returns:
        Tokens of the step.
    """
    plan = scheduler.schedule()
    for row in plan.scheduled:
        if row.is_last_chunk:
            token_ids[row.id].append((row.id + row.start) % VOCAB_SIZE)
    finished: list[RequestId] = []
    if max_tokens is not None:
        ends = ((row.id, row.start + row.num_tokens) for row in plan.scheduled)
        finished = [id_ for id_, end in ends if end + 1 == max_tokens[id_]]
    scheduler.commit(plan, finished)
    return plan.num_tokens


def time_ms(call: Callable[[], object], num_repeats: int) -> Iterator[float]:
    for _ in range(num_repeats):
        start = time.perf_counter()
        call()
        yield (time.perf_counter() - start) * 1e3


def median_after_warmup(values: Iterable[float]) -> float:
    """Median without the first tenth."""
    timings = list(values)
    return median(timings[len(timings) // 10 :])


def measure_scheduler_step(num_steps: int) -> Figure:
    scheduler, _ = make_scheduler(NUM_SEQUENCES * (CONTEXT_TOKENS + num_steps) // BLOCK_SIZE * 2)
    prompts = Prompts()
    token_ids = {id_: prompts.next(CONTEXT_TOKENS + id_ % BLOCK_SIZE) for id_ in map(RequestId, range(NUM_SEQUENCES))}
    for id_, known in token_ids.items():
        scheduler.add(NewSequence(id_, known, num_steps * 2, CacheNamespace()))
    while scheduler.stats().num_waiting:
        run_step(scheduler, token_ids)
    run_step(scheduler, token_ids)
    value = median_after_warmup(time_ms(lambda: run_step(scheduler, token_ids), num_steps))
    return Figure(f"scheduler and cache, step of {NUM_SEQUENCES} decodes", value, "ms", bar=0.5)


def make_backend() -> PagedBackend:
    overrides = {
        "model.path": "none",
        "model.dtype": "float32",
        "model.device": "cpu",
        "cache.num_blocks": 2 * NUM_SEQUENCES * 2 * CONTEXT_TOKENS // BLOCK_SIZE,
        "scheduler.max_num_sequences": NUM_SEQUENCES,
    }
    config = resolve_config(load_config(None, overrides, {}), ConstantModel.spec)
    kernels = load_plugin(KERNELS, "reference").create(config.device)
    backend = PagedBackend(config, ConstantModel(), kernels)
    backend.warmup(WarmupLimits())
    return backend


def measure_backend_step(num_steps: int) -> Figure:
    backend, prompts = make_backend(), Prompts()
    params = SamplingParams(max_new_tokens=CONTEXT_TOKENS, ignore_eos=True)
    prompt_lengths = [CONTEXT_TOKENS + index % BLOCK_SIZE for index in range(NUM_SEQUENCES)]
    backend.add([Request(RequestId(i), prompts.next(length), params) for i, length in enumerate(prompt_lengths)])
    while len(backend.step()) < NUM_SEQUENCES:
        pass
    value = median_after_warmup(time_ms(backend.step, num_steps))
    backend.close()
    return Figure(f"whole backend without the model, step of {NUM_SEQUENCES} decodes", value, "ms", bar=0.05 * 40)


def measure_admission(num_repeats: int) -> list[Figure]:
    """`add` and `schedule` of a long prompt that the cache does not know, and of one that it has whole."""
    scheduler, _ = make_scheduler(4 * PROMPT_TOKENS // BLOCK_SIZE)
    prompts = Prompts()
    timings: dict[str, list[float]] = {"unknown": [], "cached": []}
    for index in range(num_repeats):
        prompt = prompts.next(PROMPT_TOKENS)
        for offset, kind in enumerate(timings):
            id_ = RequestId(2 * index + offset)
            start = time.perf_counter()
            scheduler.add(NewSequence(id_, prompt, 1, CacheNamespace()))
            plan = scheduler.schedule()
            timings[kind].append((time.perf_counter() - start) * 1e3)
            scheduler.commit(plan, [id_])
    return [
        Figure(f"admission of {PROMPT_TOKENS} tokens, {kind} prefix", median_after_warmup(values), "ms", bar=3)
        for kind, values in timings.items()
    ]


def measure_burst(num_requests: int, num_repeats: int) -> Figure:
    """`schedule` of a step that admits a burst of short prompts, all at once."""
    prompts, timings = Prompts(), []
    settings = SchedulerSettings("continuous", 2**20, num_requests, BLOCK_SIZE)
    num_blocks = 8 * num_requests
    for _ in range(num_repeats):
        cache = load_plugin(CACHE_MANAGERS, "paged").create(num_blocks, BLOCK_SIZE)
        scheduler = load_plugin(SCHEDULERS, settings.name).create(settings, cache, num_blocks * BLOCK_SIZE)
        for index in range(num_requests):
            scheduler.add(NewSequence(RequestId(index), prompts.next(4 * BLOCK_SIZE), 32, CacheNamespace()))
        start = time.perf_counter()
        plan = scheduler.schedule()
        timings.append((time.perf_counter() - start) * 1e3)
        assert len(plan.scheduled) == num_requests
    return Figure(f"admission of a burst of {num_requests} prompts", median_after_warmup(timings), "ms", bar=20)


def time_unique_prompts(has_prefix_cache: bool) -> float:
    """Microseconds of scheduling a token, where no prompt is ever seen twice and blocks have to be evicted."""
    num_requests, num_new_tokens = 4 * NUM_SEQUENCES, 64
    scheduler, _ = make_scheduler(NUM_SEQUENCES * 2 * CONTEXT_TOKENS // BLOCK_SIZE, has_prefix_cache)
    prompts = Prompts()
    token_ids = {RequestId(i): prompts.next(CONTEXT_TOKENS) for i in range(num_requests)}
    max_tokens = dict.fromkeys(token_ids, CONTEXT_TOKENS + num_new_tokens)
    num_tokens = 0
    start = time.perf_counter()
    for id_, known in token_ids.items():
        scheduler.add(NewSequence(id_, known, num_new_tokens, CacheNamespace()))
    while scheduler.stats().num_waiting or scheduler.stats().num_running:
        num_tokens += run_step(scheduler, token_ids, max_tokens)
    return (time.perf_counter() - start) * 1e6 / num_tokens


def measure_prefix_cache_cost(num_repeats: int) -> float:
    """Microseconds a token that prefix caching adds at a hit rate of 0; runs with and without it take turns."""
    differences = [time_unique_prompts(True) - time_unique_prompts(False) for _ in range(num_repeats + 1)]
    return median(differences[1:])


def measure_model_throughput(model: str) -> float:
    """Tokens a second, prompt and output, of a model on this machine: 16 prompts of 256 tokens, 32 new tokens."""
    from pagedkv.plugin.assemble import assemble

    backend = assemble(load_config(None, {"model.path": model, "cache.prefix_caching": False}, {})).backend
    backend.warmup(WarmupLimits(max_total_tokens=512))
    prompts, params = Prompts(), SamplingParams(max_new_tokens=32, ignore_eos=True)
    backend.add([Request(RequestId(i), prompts.next(256), params) for i in range(16)])
    start = time.perf_counter()
    while backend.has_unfinished():
        backend.step()
    seconds = time.perf_counter() - start
    backend.close()
    return 16 * (256 + 32) / seconds


def measure_all(model: str | None) -> list[Figure]:
    num_threads = torch.get_num_threads()
    # The tensors of a step without a model are too small to share among threads.
    torch.set_num_threads(1)
    figures = [measure_scheduler_step(300), measure_backend_step(200), *measure_admission(40)]
    figures.append(measure_burst(1024, 10))
    torch.set_num_threads(num_threads)
    added_us = measure_prefix_cache_cost(5)
    figures.append(Figure("prefix caching at hit rate 0, added", added_us, "us/token"))
    figures.append(Figure("throughput at which this is 1 %", 0.01 * 1e6 / max(added_us, 1e-3), "tokens/s"))
    if model is not None:
        throughput = measure_model_throughput(model)
        figures.append(Figure("throughput of the model", throughput, "tokens/s"))
        figures.append(Figure("prefix caching at hit rate 0, share", added_us * throughput * 1e-4, "%", bar=1))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what scheduling costs without a model.")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--model", help="directory of a model whose throughput prefix caching is held against")
    arguments = parser.parse_args()
    figures = measure_all(arguments.model)
    if arguments.json:
        print(json.dumps([{**asdict(figure), "is_met": figure.is_met} for figure in figures], indent=2))
        return
    for figure in figures:
        bar = f"  (bar {figure.bar:g}: {'met' if figure.is_met else 'MISSED'})" if figure.bar is not None else ""
        print(f"{figure.name:58} {figure.value:10.3f} {figure.unit}{bar}")


if __name__ == "__main__":
    main()
