"""Shards in processes of their own: they agree, or all of them end, saying why."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedkv.plugin.conformance.shards import ShardOutcome

SCRIPT = Path(__file__).with_name("shard_scenarios.py")
EXIT_FAILED = 3
MAX_END_S = 10.0


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[ShardOutcome]]:
    """What became of the shards of each scenario, by rank."""
    ended = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=170)
    assert ended.returncode == 0, ended.stderr
    scenarios: dict[str, list[dict[str, Any]]] = json.loads(ended.stdout)
    return {name: [ShardOutcome(**shard) for shard in shards] for name, shards in scenarios.items()}


def _results(shards: list[ShardOutcome]) -> list[Any]:
    assert [(shard.code, shard.failure) for shard in shards] == [(0, "")] * len(shards)
    return [shard.result for shard in shards]


def _shared_failure(shards: list[ShardOutcome]) -> str:
    """What all survivors were told, alike, in good time."""
    survivors = [shard for shard in shards if shard.code == EXIT_FAILED]
    assert all(shard.duration_s < MAX_END_S for shard in survivors)
    (failure,) = {shard.failure for shard in survivors}
    return failure


def test_every_shard_gathers_the_values_of_all_in_order_of_rank(outcomes) -> None:
    assert _results(outcomes["gather"]) == [[-(2**63), 1 - 2**63]] * 2


def test_shards_sample_the_same_tokens_without_a_seed_and_preempt_and_evict_alike(outcomes) -> None:
    first, second = _results(outcomes["agree"])
    assert first == second
    assert len(first["tokens"]) == 16
    assert {len(tokens) for tokens in first["tokens"].values()} == {24}
    assert first["stats"]["preemptions"] > 0
    assert first["stats"]["prefix_cache_hit_tokens"] > 0


def test_shards_whose_memory_differs_take_the_smaller_pool_and_evict_alike(outcomes) -> None:
    first, second = _results(outcomes["different_memory"])
    assert first == second
    assert first["num_total_blocks"] == 20
    assert first["evictions"] > 0


def test_too_little_memory_on_one_shard_is_refused_on_all(outcomes) -> None:
    first, second = _results(outcomes["too_little_memory_on_one"])
    assert "would have 0 blocks" in first
    assert "would have 0 blocks" in second


def test_batches_are_padded_on_all_shards_or_on_none(outcomes) -> None:
    assert _results(outcomes["graphs_on_one_shard_alone"]) == [[True, False]] * 2


@pytest.mark.parametrize("scenario", ["different_requests", "different_tokens"])
def test_shards_that_decide_differently_all_end(outcomes, scenario: str) -> None:
    assert [shard.code for shard in outcomes[scenario]] == [EXIT_FAILED] * 2
    failure = _shared_failure(outcomes[scenario])
    assert "have decided differently" in failure
    assert "rank 0: " in failure
    assert "rank 1: " in failure


def test_call_that_reaches_one_shard_only_ends_all_when_a_step_has_had_its_time(outcomes) -> None:
    assert [shard.code for shard in outcomes["call_on_one_shard"]] == [EXIT_FAILED] * 2
    failure = _shared_failure(outcomes["call_on_one_shard"])
    assert "more than 1 s on rank 0" in failure
    assert "every call must reach all shards" in failure


def test_fault_in_a_step_of_one_shard_ends_all(outcomes) -> None:
    assert [shard.code for shard in outcomes["fault_on_one_shard"]] == [EXIT_FAILED] * 2
    failure = _shared_failure(outcomes["fault_on_one_shard"])
    assert failure == "step 0 failed on rank 1: ArithmeticError: a fault of this shard alone"


@pytest.mark.parametrize(
    ("scenario", "killed"),
    [("kill_one_while_idle", 1), ("kill_the_first_of_three_in_a_step", 0), ("kill_the_last_of_three_in_a_step", 2)],
)
def test_death_of_a_shard_ends_the_others_within_seconds_and_names_it(outcomes, scenario: str, killed: int) -> None:
    codes = [shard.code for shard in outcomes[scenario]]
    assert codes.pop(killed) == -signal.SIGKILL
    assert set(codes) == {EXIT_FAILED}
    assert f"rank {killed} has ended unexpectedly" in _shared_failure(outcomes[scenario])


def test_step_after_a_shard_has_left_in_order_ends_the_others(outcomes) -> None:
    waiting, left = outcomes["step_after_one_has_left"]
    assert (waiting.code, left.code) == (EXIT_FAILED, 0)
    assert "rank 1 has left" in waiting.failure
