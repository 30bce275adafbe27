"""Measures what metrics add to a step.

    python integration/measure/micro/metrics_cost.py [--json] [--model DIR] [--sequences N]


N sequences decode side by side in the paged backend. Timed are, on the same state:

- the step itself, without anybody watching;
- what the step's thread does for the metrics after it: the snapshot and the counters;
- what one request adds at its first token and its end;
- one scrape. It runs on a thread of its own, but Python runs one thread at a time, so that it is counted in full, once
  every SCRAPE_INTERVAL_S.

All figures are medians. Held against 1 % of a step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from prometheus_client import CollectorRegistry, generate_latest

from pagedkv.integration.serve.metrics.server_metrics import ServerMetrics
from pagedkv.plugin.assemble import assemble
from pagedkv.plugin.config import load_config
from pagedkv.plugin.interface import Backend, WarmupLimits
from pagedkv.plugin.observer import Observers, Outcome, RequestEnd
from pagedkv.plugin.requests import Request, RequestId, SamplingParams

MAX_SHARE = 0.01
SCRAPE_INTERVAL_S = 5.0
NUM_PROMPT_TOKENS = 128
MAX_NEW_TOKENS = 1024
"""More than any sequence gets to."""

NUM_STEPS = 30
NUM_WARMUP_STEPS = 3
NUM_REPEATS = 500


@dataclass(frozen=True, slots=True)
class MetricsCost:
    num_sequences: int
    step_ms: float
    """Of the backend, one token of each sequence."""
    after_step_ms: float
    """Of the metrics, on the step's thread."""
    request_ms: float
    """Of the metrics, once a request."""
    scrape_ms: float
    share: float
    """Of a step: after_step_ms, and the scrapes' share of the time."""


def measure(backend: Backend, num_sequences: int, num_steps: int = NUM_STEPS) -> MetricsCost:
    """`backend` is warmed up and idle, and is so again afterwards."""
    metrics = ServerMetrics(backend.info, backend.stats(), model="measured")
    observers = Observers((metrics,), (metrics,))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    ids = [RequestId(number) for number in range(num_sequences)]
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True)
    vocab_size = backend.info.model.vocab_size
    prompts = [[(7 * id_ + place) % (vocab_size - 1) + 1 for place in range(NUM_PROMPT_TOKENS)] for id_ in ids]
    backend.add([Request(id_, prompt, params) for id_, prompt in zip(ids, prompts, strict=True)])
    without_token = set(ids)
    while without_token:
        without_token -= {output.request_id for output in backend.step()}
    _time(backend.step, NUM_WARMUP_STEPS)
    step_ms = _time(backend.step, num_steps)
    assert backend.stats().running == num_sequences, "a sequence waits; the step is not of all"
    after_step_ms = _time(lambda: observers.report_step(0.01, backend.stats()), NUM_REPEATS)
    request_ms = _time(lambda: _report_request(observers), NUM_REPEATS)
    scrape_ms = _time(lambda: generate_latest(registry), NUM_REPEATS // 10)
    backend.abort(ids)
    share = after_step_ms / step_ms + scrape_ms / (SCRAPE_INTERVAL_S * 1e3)
    return MetricsCost(num_sequences, step_ms, after_step_ms, request_ms, scrape_ms, share)


def _report_request(observers: Observers) -> None:
    observers.report_first_token(0.0, 0.1, 0.2)
    observers.report_end(RequestEnd(RequestId(0), Outcome.LENGTH, 128, 64, 32, 0.0, 0.1, 0.2, 1.0))


def _time(call: Callable[[], object], num_calls: int) -> float:
    """Median milliseconds of a call."""
    times = []
    for _ in range(num_calls):
        started_ns = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started_ns)
    return median(times) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--model", type=Path, help="the demo model if left out")
    parser.add_argument("--sequences", type=int, default=64)
    arguments = parser.parse_args()

    from pagedkv.integration.demo_model import ensure_demo_model

    num_tokens = arguments.sequences * (NUM_PROMPT_TOKENS + 2 * NUM_STEPS)
    overrides = {
        "model.path": str(arguments.model or ensure_demo_model()),
        "cache.num_blocks": num_tokens // 16 + 2 * arguments.sequences,
        "limits.max_total_tokens": NUM_PROMPT_TOKENS + MAX_NEW_TOKENS,
    }
    backend = assemble(load_config(None, overrides)).backend
    backend.warmup(WarmupLimits())
    cost = measure(backend, arguments.sequences)
    backend.close()
    if arguments.json:
        print(json.dumps(asdict(cost)))
    else:
        print(
            f"{cost.num_sequences} sequences: step {cost.step_ms:.2f} ms, after it {cost.after_step_ms:.4f} ms, "
            f"once a request {cost.request_ms:.4f} ms, a scrape {cost.scrape_ms:.2f} ms: {cost.share:.3%} of a step "
            f"(bar {MAX_SHARE:.0%}: {'met' if cost.share < MAX_SHARE else 'missed'})"
        )
    return 0 if cost.share < MAX_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
