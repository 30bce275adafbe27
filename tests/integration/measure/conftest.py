"""A peer that computes nothing, and a tiny model with real words."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedkv.integration.measure.benchmark.engine_process import EngineSpec

FAKE_PEER = """
import json, os, sys, time
behaviour, options = sys.argv[1], json.loads(sys.argv[-1])
if behaviour == "no-start":
    print("there is no libfoo", file=sys.stderr)
    sys.exit(3)
print(json.dumps({"info": {"engine": "fake", "version": "1", "pid": os.getpid(), **options}}), flush=True)
for line in sys.stdin:
    requests = json.loads(line)["requests"]
    if behaviour == "crash":
        sys.exit("out of memory, says the fake")
    if behaviour == "hang":
        time.sleep(60)
    if behaviour == "chatter":
        print("a library says hello", flush=True)
    missing = behaviour == "lazy"
    times = [
        {"num_tokens": one["max_new_tokens"] - missing, "ttft_s": 0.5, "end_s": 0.25 + 0.25 * one["max_new_tokens"],
         "longest_gap_s": 0.25, "num_cached_tokens": len(one["prompt_ids"]) // 2}
        for one in requests
    ]
    cache = {"peak_kv_bytes": 2**20, "waste": 0.125, "peak_running": len(requests)}
    print(json.dumps({"seconds": 2.0, "requests": times, "cache": cache}), flush=True)
"""


@pytest.fixture(scope="session")
def fake_peer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The command of a runner that answers at once; a behaviour is to follow it."""
    script = tmp_path_factory.mktemp("peer") / "peer.py"
    script.write_text(FAKE_PEER)
    return f"{sys.executable} {script}"


@pytest.fixture(scope="session")
def fake_spec(fake_peer: str) -> Callable[[str], EngineSpec]:
    return lambda behaviour: EngineSpec("fake", [*fake_peer.split(), behaviour, json.dumps({"model": "m"})])


@pytest.fixture(scope="session")
def tiny_model(save_tiny_llama: Callable[..., Path]) -> Path:
    """A Llama of one layer, float32, random weights, with the demo model's tokenizer."""
    return save_tiny_llama(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
