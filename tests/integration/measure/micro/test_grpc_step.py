"""The benchmark of a step around the backend measures what it says."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pagedkv.integration.measure.micro.grpc_step import StepCost, find_missed_bars, measure
from pagedkv.plugin.config import parse_config
from pagedkv.plugin.registry import MODELS, load_plugin
from pagedkv.plugin.resolved_config import resolve_model_settings


def test_text_is_part_of_the_server_s_time_and_that_of_the_round_trip(demo_model: Path) -> None:
    adapter = load_plugin(MODELS, "transformers")
    settings = resolve_model_settings(parse_config({"model": {"path": str(demo_model)}}))
    (cost,) = asyncio.run(measure(adapter.describe(settings), adapter.load_tokenizer(settings), counts=[4]))
    assert cost.num_sequences == 4
    assert 0 < cost.text_ms < cost.server_ms < cost.round_trip_ms


def test_a_bar_counts_at_its_own_number_of_sequences_alone() -> None:
    slow = [StepCost(num_sequences, 1.5, 1.0, 2.0) for num_sequences in (1, 32, 128)]
    assert find_missed_bars(slow) == [slow[1]]
