"""The load on an SMG worker: every stream's requests are answered and counted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pagedkv.integration.measure.micro import smg_load
from pagedkv.integration.serve.child_process import child_server


@pytest.mark.slow
def test_each_number_of_streams_has_its_figures(tiny_model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(smg_load, "MIN_REQUESTS", 4)
    command = [str(tiny_model), "--protocol", "smg", "--listen", "127.0.0.1:0", "--set", "cache.num_blocks=256"]
    with child_server(command, tmp_path / "log") as server:
        one, three = asyncio.run(smg_load.measure(server.target, [1, 3], num_new_tokens=5))
    assert (one.num_requests, three.num_requests) == (4, 9)
    for load in (one, three):
        assert min(load.ttft_ms, load.tokens_per_s) > 0
        assert load.tpot_ms >= 0, "0 where a reader that is behind gets all tokens at once"
