"""The rules of the router's calls: kept by every recording of the real one, and able to be broken."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pagedkv.adapters.tgi import generate_pb2 as pb

from .recordings.calls import PROBE_ID, Call, Recording
from .recordings.checker import check_recording
from .recordings.rules import RULES, Tally
from .recordings.rules_table import make_rules_table

FOLDER = Path(__file__).with_name("recordings")
PATHS = {path.stem: path for path in sorted((FOLDER / "traces").glob("*.jsonl"))}
FRESH_VARIABLE = "PAGEDKV_ROUTER_RECORDINGS"
"""A folder with recordings made by hand with recorder.py."""


@cache
def _tally(path: Path) -> Tally:
    return check_recording(Recording.read(path))


@pytest.mark.parametrize("name", PATHS)
def test_the_real_router_keeps_every_rule(name: str) -> None:
    assert _tally(PATHS[name]).violations == []


def test_fresh_recordings_keep_every_rule() -> None:
    folder = os.environ.get(FRESH_VARIABLE)
    if folder is None:
        pytest.skip(f"{FRESH_VARIABLE} names no folder with recordings")
    paths = list(Path(folder).glob("*.jsonl"))
    assert paths
    assert [violation for path in paths for violation in _tally(path).violations] == []


def test_each_rule_was_seen() -> None:
    seen = sum((_tally(path).num_checks for path in PATHS.values()), start=Tally().num_checks)
    assert set(RULES) == set(seen)


def test_the_table_of_rules_is_up_to_date() -> None:
    table = make_rules_table({name: _tally(path) for name, path in PATHS.items()})
    path = FOLDER / "RULES.md"
    if os.environ.get("PAGEDKV_UPDATE_TABLES"):
        path.write_text(table, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == table, "run this test with PAGEDKV_UPDATE_TABLES=1"


Break = Callable[[list[Call]], Any]
"""Changes the calls of a recording so that a rule does not hold."""


def _find(calls: list[Call], method: str, index: int = 0) -> Call:
    return [call for call in calls if call.method == method and not call.is_probe][index]


def _request(calls: list[Call], index: int = 0) -> Any:
    """The first request of a Prefill."""
    return _find(calls, "Prefill", index).request.batch.requests[0]


def _with_prefix(calls: list[Call]) -> Any:
    return next(r for c in calls if c.method == "Prefill" for r in c.request.batch.requests if r.cache_len)


def _chunked(calls: list[Call]) -> Any:
    found = (r for c in calls if c.method == "Prefill" for r in c.request.batch.requests if r.HasField("chunk_len"))
    return next(found)


def _set(target: Any, **fields: Any) -> None:
    for name, value in fields.items():
        if isinstance(value, list):
            del getattr(target, name)[:]
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)


def _overlap(calls: list[Call]) -> None:
    index = calls.index(_find(calls, "Decode"))
    calls[index] = replace(calls[index], begin_ms=calls[index - 1].begin_ms)


def _remove(method: str, index: int = 0) -> Break:
    return lambda calls: calls.remove(_find(calls, method, index))


def _remove_decodes_behind_the_first_mixed_prefill(calls: list[Call]) -> None:
    begin, end = (calls.index(_find(calls, "Prefill", index)) for index in (1, 2))
    del calls[begin + 1 : end]


def _forget_the_generation_of_who_is_gone(calls: list[Call]) -> None:
    index = calls.index(_find(calls, "FilterBatch"))
    kept = set(calls[index].request.request_ids)
    generations = calls[index - 1].answer.generations
    left = [generation for generation in generations if generation.request_id in kept]
    del generations[:]
    generations.extend(left)


def _share_the_own_block_of_a_live_request(calls: list[Call]) -> None:
    first, second, _ = _find(calls, "Prefill", 4).request.batch.requests
    second.blocks[0] = first.blocks[-1]


def _go_on_after_an_error(calls: list[Call]) -> None:
    failed = next(call for call in calls if call.error is not None)
    behind = next(c for c in calls if c.method == "Prefill" and c.begin_ms > failed.end_ms and not c.is_probe)
    behind.request.cached_batch.CopyFrom(failed.request.cached_batch)


def _probe(calls: list[Call]) -> Call:
    return next(call for call in calls if call.is_probe)


def _replace(calls: list[Call], old: Call, like: Call) -> None:
    calls[calls.index(old)] = replace(old, method=like.method, request=like.request, answer=like.answer)


BREAKS: dict[str, tuple[str, Break]] = {
    "start-order": ("start", lambda calls: _set(_find(calls, "ClearCache").request, id=5)),
    "warm-up-batch": ("start", lambda calls: _set(_find(calls, "Warmup").request.batch.requests[0], truncate=7)),
    "warm-up-limits": ("full", lambda calls: _set(_find(calls, "Warmup").answer, max_total_tokens=7)),
    "every-shard": ("shards", lambda calls: _set(_find(calls, "Decode", 6).request.batches[0], id=7)),
    "one-at-a-time": ("joined", _overlap),
    "batch-ids": ("joined", lambda calls: _set(_find(calls, "Prefill", 1).request.batch, id=7)),
    "request-ids": ("joined", lambda calls: _set(_request(calls, 2), id=1)),
    "cached-batch": ("joined", lambda calls: _set(_find(calls, "Prefill", 1).request.cached_batch, size=7)),
    "decode-batches": ("joined", lambda calls: _set(_find(calls, "Decode", 2).request.batches[0], current_tokens=7)),
    "decode-after-mixed": ("joined", _remove_decodes_behind_the_first_mixed_prefill),
    "filter-after-answer": ("gone", lambda calls: _set(_find(calls, "FilterBatch").request, batch_id=7)),
    "filter-if-sizes-differ": ("gone", _remove("FilterBatch")),
    "clear-where-none-lives": ("gone", lambda calls: _set(_find(calls, "ClearCache", 1).request, id=7)),
    "gone-at-generation": ("gone", _forget_the_generation_of_who_is_gone),
    "error-clears": ("refused", _remove("ClearCache", 1)),
    "error-drops-all": ("refused", _go_on_after_an_error),
    "batch-size": ("joined", lambda calls: _set(_find(calls, "Prefill").request.batch, size=7)),
    "batch-max-tokens": ("joined", lambda calls: _set(_find(calls, "Prefill").request.batch, max_tokens=7)),
    "batch-max-blocks": ("joined", lambda calls: _set(_find(calls, "Prefill").request.batch, max_blocks=7)),
    "request-tokens": ("joined", lambda calls: _set(_request(calls), slots=list(_request(calls).slots)[:1])),
    "slots-from-blocks": ("joined", lambda calls: _set(_request(calls), slots=list(_request(calls).slots)[::-1])),
    "block-zero": ("joined", lambda calls: _set(_request(calls), blocks=[0])),
    "blocks-disjoint": ("joined", lambda calls: _set(_request(calls, 1), blocks=list(_request(calls).blocks))),
    "blocks-in-all": ("full", lambda calls: _set(_find(calls, "Warmup").answer, max_supported_total_tokens=48)),
    "prefix-not-live": ("prefix", _share_the_own_block_of_a_live_request),
    "prefix-length": ("prefix", lambda calls: _set(_with_prefix(calls), cache_len=33)),
    "no-prefix-with-logprobs": ("prefix", lambda calls: _set(_request(calls, 5), cache_len=16)),
    "prefill-budget": (
        "chunks",
        lambda calls: _chunked(calls).ClearField("chunk_len"),
    ),
    "chunk-fills-budget": ("chunks", lambda calls: _set(_chunked(calls), chunk_len=7)),
    "max-new-tokens": ("pieces", lambda calls: _set(_request(calls).stopping_parameters, max_new_tokens=1025)),
    "text": ("start", lambda calls: _set(_request(calls), inputs="Two")),
    "parameters": ("start", lambda calls: _set(_request(calls).parameters, temperature=0)),
    "never-ignore-eos": ("start", lambda calls: _set(_request(calls).stopping_parameters, ignore_eos_token=True)),
    "grammar": ("openai", lambda calls: _set(_request(calls, 3).parameters, grammar_type=pb.GRAMMAR_TYPE_JSON)),
    "adapter-from-model": ("openai", lambda calls: _set(_request(calls, 2), adapter_id="tgi")),
    "piece-again": ("pieces", lambda calls: _set(_request(calls, 1), inputs="And now for something else")),
    "probe-content": ("refused", lambda calls: _set(_probe(calls).request.batch.requests[0], truncate=2)),
    "probe-forgotten": ("refused", lambda calls: _set(_find(calls, "Decode", 2).request.batches[0], id=PROBE_ID)),
    "probe-after-failure": ("refused", lambda calls: _replace(calls, _find(calls, "Health", 1), _probe(calls))),
    "probe-until-well": ("probes", lambda calls: _replace(calls, _probe(calls), _find(calls, "Health"))),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_router_that_breaks_a_rule_is_found_out(rule: str) -> None:
    name, break_it = BREAKS[rule]
    recording = Recording.read(PATHS[name])
    break_it(recording.calls)
    assert rule in {violation.rule for violation in check_recording(recording).violations}
