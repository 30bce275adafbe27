"""The benchmark of a streamed token measures what it says."""

from __future__ import annotations

import asyncio

import pytest

from pagedkv.integration.measure.micro import smg_stream


def test_every_stream_gets_its_tokens_and_grpc_costs_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smg_stream, "STEP_S", 0.0)
    (cost,) = asyncio.run(smg_stream.measure(counts=[2], num_repetitions=1))
    assert cost.num_streams == 2
    assert 0 < cost.worker_us < cost.total_us
