"""The knobs that are measured: each with its values, the requests that show its effect, and the figures to report."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pagedkv.integration.measure.benchmark.engine_process import EngineSpec, Repetition
from pagedkv.integration.measure.benchmark.runners.protocol import RunRequest
from pagedkv.integration.measure.benchmark.summary import Figures, summarize
from pagedkv.integration.measure.benchmark.workloads import ALL_AT_ONCE, SHAPES, Arrivals, Shape, draw_workload

SEED = 0
_STREAM_TOKENS = (64, 400)
"""Prompt and new tokens of the stream whose gaps are measured."""
_LONG_PROMPT_TOKENS = 6000
_LONG_PROMPT_ARRIVAL_S = 0.5
_RESERVED_NEW_TOKENS = 256
_BASE = {"cache.memory": "1GiB"}

Draw = Callable[[Sequence[int], int], list[RunRequest]]
"""Makes requests from token ids and the number of the repetition. No two repetitions have a prompt in common."""


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    draw: Draw
    description: str


@dataclass(frozen=True, slots=True)
class Measure:
    load: str
    label: str
    """Name of the figure, with its unit."""
    read: Callable[[Repetition], float]
    digits: int = 0


@dataclass(frozen=True, slots=True)
class Knob:
    name: str
    key: str
    """Key of the config."""
    values: Sequence[Any]
    loads: Sequence[Load]
    measures: Sequence[Measure]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Config keys that are the same for all values."""
    reserved_new_tokens: int = 0
    """See `TuningEngine`."""

    def make_specs(self, model: str) -> list[EngineSpec]:
        """Makes an engine for each value, with the value as its name."""
        return [self._make_spec(model, value) for value in self.values]

    def _make_spec(self, model: str, value: Any) -> EngineSpec:
        overrides = {**_BASE, **self.overrides, self.key: value, "model.path": model, "backend": "paged"}
        options = {
            "config_file": None,
            "overrides": overrides,
            "reserved_new_tokens": self.reserved_new_tokens,
        }
        command = [sys.executable, "-m", "pagedkv.integration.measure.tuning.engine", json.dumps(options)]
        return EngineSpec(name_value(value), command)


def name_value(value: Any) -> str:
    """Formats a value as in a TOML file, without quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _load(shape: Shape, arrivals: Arrivals = ALL_AT_ONCE) -> Load:
    description = f"{shape.describe()}, {arrivals.describe()}"
    return Load(shape.name, lambda tokens, number: draw_workload(shape, arrivals, tokens, SEED, number), description)


def draw_stream_and_prompt(tokens: Sequence[int], number: int) -> list[RunRequest]:
    """Makes a stream, and a very long prompt that arrives while it runs."""
    random_ = random.Random(f"stutter {number}")  # noqa: S311 # token ids for a benchmark
    num_prompt_tokens, num_new_tokens = _STREAM_TOKENS
    stream = RunRequest(random_.choices(tokens, k=num_prompt_tokens), num_new_tokens)
    return [stream, RunRequest(random_.choices(tokens, k=_LONG_PROMPT_TOKENS), 2, _LONG_PROMPT_ARRIVAL_S)]


def _figures(read: Callable[[Figures], float]) -> Callable[[Repetition], float]:
    return lambda repetition: read(summarize([repetition]))


def _request(index: int, read: Callable[[Figures], float]) -> Callable[[Repetition], float]:
    """Reads a figure of one request. Requests are in the order of arrival."""
    return lambda repetition: read(summarize([replace(repetition, requests=[repetition.requests[index]])]))


def _cache(key: str, factor: float = 1) -> Callable[[Repetition], float]:
    return lambda repetition: float(repetition.cache[key] * factor)


def _ttft_s(percent: str) -> Callable[[Figures], float]:
    return lambda figures: float(getattr(figures.ttft_s, percent))


def _tpot_ms(figures: Figures) -> float:
    assert figures.tpot_s is not None, "a load of single tokens has no time a token"
    return figures.tpot_s.p50 * 1e3


def _gap_ms(figures: Figures) -> float:
    return figures.longest_gap_s * 1e3


def _hit_percent(figures: Figures) -> float:
    assert figures.prefix_hit_rate is not None
    return figures.prefix_hit_rate * 100


def _speed(load: str) -> Measure:
    return Measure(load, "tokens/s", _figures(lambda figures: figures.tokens_per_s))


def _ttft(load: str, percent: str = "p50") -> Measure:
    return Measure(load, f"TTFT {percent}, s", _figures(_ttft_s(percent)), 2)


def _tpot(load: str) -> Measure:
    return Measure(load, "TPOT p50, ms", _figures(_tpot_ms), 1)


def _peak(load: str) -> Measure:
    return Measure(load, "KV held, MiB", _cache("peak_kv_bytes", 2**-20))


def _at_once(load: str) -> Measure:
    return Measure(load, "running at once", _cache("peak_running"))


def _preemptions(load: str) -> Measure:
    return Measure(load, "preemptions", _cache("preemptions"))


KNOBS = (
    Knob(
        "block_size",
        "cache.block_size",
        (8, 16, 32, 64, 128),
        [_load(SHAPES["mixed"]), _load(Shape("shared", 24, (40,), (16,), shared_tokens=200))],
        [
            _speed("mixed"),
            _tpot("mixed"),
            _peak("mixed"),
            Measure("mixed", "slots without a token, %", _cache("waste", 100), 1),
            Measure("shared", "prefix hits, %", _figures(_hit_percent), 1),
        ],
    ),
    Knob(
        "kv_dtype",
        "cache.kv_dtype",
        ("bf16", "int8", "fp8_e4m3", "int4"),
        [_load(Shape("stream", 1, (3072,), (64,))), _load(Shape("crowd", 32, (512,), (64,)))],
        [
            _ttft("stream"),
            _tpot("stream"),
            _peak("stream"),
            _speed("crowd"),
            _ttft("crowd", "p90"),
            _at_once("crowd"),
            _preemptions("crowd"),
        ],
        {"cache.memory": "96MiB", "limits.max_total_tokens": 4096},
    ),
    Knob(
        "max_step_tokens",
        "scheduler.max_step_tokens",
        (256, 512, 1024, 2048, 4096),
        [
            _load(Shape("arriving", 12, (1024,), (64,)), Arrivals(2.0)),
            _load(Shape("burst", 6, (1024,), (16,))),
        ],
        [
            Measure("arriving", "longest gap, ms", _figures(_gap_ms)),
            _ttft("arriving", "p90"),
            _tpot("arriving"),
            _speed("burst"),
            _ttft("burst"),
        ],
    ),
    Knob(
        "max_gap_ms",
        "scheduler.max_gap_ms",
        (0, 400, 200, 100, 50),
        [
            Load(
                "stutter",
                draw_stream_and_prompt,
                f"a stream of {_STREAM_TOKENS[1]} tokens, and after {_LONG_PROMPT_ARRIVAL_S:g} s a prompt of "
                f"{_LONG_PROMPT_TOKENS}",
            )
        ],
        [
            Measure("stutter", "longest gap of the stream, ms", _request(0, _gap_ms)),
            Measure("stutter", "TPOT of the stream, ms", _request(0, _tpot_ms), 1),
            Measure("stutter", "TTFT of the prompt, s", _request(1, _ttft_s("p50")), 2),
        ],
    ),
    Knob(
        "overcommit",
        "cache.overcommit",
        (1.0, 1.5, 2.0, 4.0),
        [_load(Shape("short answers", 48, (64,), (16, 64, 128)))],
        [
            _speed("short answers"),
            _ttft("short answers", "p90"),
            _tpot("short answers"),
            _at_once("short answers"),
            _preemptions("short answers"),
            Measure("short answers", "recomputed tokens", _cache("recomputed_tokens")),
        ],
        {"cache.memory": "auto", "cache.num_blocks": 160, "limits.max_total_tokens": 1024},
        _RESERVED_NEW_TOKENS,
    ),
    Knob(
        "prefix_caching",
        "cache.prefix_caching",
        (True, False),
        [_load(replace(SHAPES["prefix"], num_requests=16)), _load(Shape("unlike", 16, (512,), (32,)))],
        [
            _speed("prefix"),
            _ttft("prefix"),
            _peak("prefix"),
            Measure("prefix", "prefix hits, %", _figures(_hit_percent), 1),
            _speed("unlike"),
            _ttft("unlike"),
        ],
    ),
    Knob(
        "max_num_sequences",
        "scheduler.max_num_sequences",
        (4, 16, 32, 64),
        [_load(Shape("queue", 64, (128,), (64,)))],
        [_speed("queue"), _ttft("queue"), _ttft("queue", "p90"), _tpot("queue"), _peak("queue")],
    ),
)
