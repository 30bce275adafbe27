"""What runners record, and our own engines under them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pagedkv.integration.measure.benchmark.runners import in_process, through_smg, through_tgi, transformers_engine
from pagedkv.integration.measure.benchmark.runners.protocol import Recorder, RunEngine, RunRequest, run_once
from pagedkv.integration.measure.benchmark.workloads import ALL_AT_ONCE, SHAPES, draw_plain_tokens, draw_workload
from pagedkv.plugin import Engine

OVERRIDES = {"cache.memory": "1MiB", "limits.max_total_tokens": 128, "scheduler.max_step_tokens": 64}


def test_recorder_hands_out_what_has_arrived_and_takes_down_tokens() -> None:
    recorder = Recorder([RunRequest([1], 2, arrival_s=1000.0), RunRequest([1, 2], 3)])
    assert [request.arrival_s for request in recorder.requests] == [0.0, 1000.0]
    assert recorder.due() == [0]
    assert recorder.due() == []
    recorder.count(0, num_cached_tokens=1)
    recorder.count(0, 0)
    recorder.count(0, 2)
    times = recorder.times[0]
    assert (times.num_tokens, times.num_cached_tokens) == (3, 1)
    assert 0 < times.ttft_s <= times.end_s
    assert times.longest_gap_s == pytest.approx(times.end_s - times.ttft_s)
    assert not recorder.is_done
    recorder.count(1, 2)
    assert recorder.is_done
    with pytest.raises(RuntimeError, match="for 2 tokens got 3"):
        recorder.count(1)


def test_recorder_waits_for_arrivals_and_refuses_to_wait_for_ever() -> None:
    recorder = Recorder([RunRequest([1], 1, arrival_s=0.02)])
    assert recorder.due() == []
    recorder.wait()
    assert recorder.due() == [0]
    with pytest.raises(RuntimeError, match="tokens are missing"):
        recorder.wait()


@contextmanager
def _closing(engine: RunEngine) -> Iterator[RunEngine]:
    try:
        yield engine
    finally:
        engine.close()


def _options(model: Path, backend: str) -> dict[str, Any]:
    return {"config_file": None, "overrides": {**OVERRIDES, "model.path": str(model), "backend": backend}}


def _draw(model: Path, name: str, scale: float, arrivals: Any = ALL_AT_ONCE) -> list[RunRequest]:
    with Engine(model, config=OVERRIDES) as engine:
        plain = draw_plain_tokens(engine.tokenizer, 49152, seed=0)
    return draw_workload(SHAPES[name].scaled(scale), arrivals, plain, seed=0, repetition=0)


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
def test_our_backends_make_all_tokens_and_tell_of_their_cache(tiny_model: Path, backend: str) -> None:
    requests = _draw(tiny_model, "prefix", 1 / 16)
    requests[20:] = [RunRequest(one.prompt_ids, 1, arrival_s=0.01) for one in requests[20:]]
    with _closing(in_process.load(_options(tiny_model, backend))) as engine:
        assert engine.info["engine"] == f"pagedkv {backend}"
        first, second = run_once(engine, requests), run_once(engine, requests[:1])
    assert [one["num_tokens"] for one in first["requests"]] == [2] * 20 + [1] * 12
    assert all(0 < one["ttft_s"] <= one["end_s"] <= first["seconds"] for one in first["requests"])
    cache = first["cache"]
    assert 0 < cache["peak_kv_bytes"] <= engine.info["kv_cache_bytes"]
    assert 0 <= cache["waste"] < 1
    # 1 MiB holds 4096 tokens of 256 bytes: 32 requests where each reserves 128.
    assert 1 <= cache["peak_running"] <= 32
    assert second["cache"]["peak_running"] <= 1, "each repetition is counted by itself"
    hits = [one["num_cached_tokens"] for one in second["requests"]]
    assert hits == [64 if backend == "paged" else 0], "a prompt of 68 tokens was there before"


def test_waste_is_what_was_held_and_empty(tiny_model: Path) -> None:
    with _closing(in_process.load(_options(tiny_model, "contiguous"))) as engine:
        cache = run_once(engine, [RunRequest([5] * 32, 1), RunRequest([7] * 32, 2)])["cache"]
    # After the prefill one row is left, then none: 32 tokens in the 128 reserved.
    assert cache["waste"] == pytest.approx(1 - 32 / 128)


def test_static_batches_of_transformers_make_each_request_its_own_number_of_tokens(tiny_model: Path) -> None:
    engine = transformers_engine.load({"model": str(tiny_model), "dtype": "float32"})
    requests = [RunRequest([5, 6, 7], 4), RunRequest([8], 1), RunRequest([9, 9], 2, arrival_s=0.05)]
    answer = run_once(engine, requests)
    assert [one["num_tokens"] for one in answer["requests"]] == [4, 1, 2]
    assert engine.info["dtype"] == "float32"


@pytest.mark.slow
@pytest.mark.parametrize(("module", "protocol"), [(through_tgi, "tgi"), (through_smg, "smg")])
def test_server_answers_the_same_requests_through_each_protocol(
    tiny_model: Path, module: ModuleType, protocol: str
) -> None:
    requests = _draw(tiny_model, "mixed", 1 / 16)
    requests[30:] = [RunRequest(one.prompt_ids, 3, arrival_s=0.02) for one in requests[30:]]
    with _closing(module.load(_options(tiny_model, "paged"))) as engine:
        assert engine.info["engine"] == f"pagedkv paged, through {protocol}"
        answer = run_once(engine, requests)
        longest = max(requests, key=lambda one: len(one.prompt_ids))
        again = run_once(engine, [RunRequest(longest.prompt_ids, 2)])
    assert [one["num_tokens"] for one in answer["requests"]] == [one.max_new_tokens for one in requests]
    assert [one["num_tokens"] for one in again["requests"]] == [2]
    assert again["requests"][0]["num_cached_tokens"] == 48, "of 64 tokens, all blocks but the last"
