"""Conversations over two replicas: the one that has a conversation's beginning gets its next turn."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .conftest import MODEL_NAME, SETTINGS
from .deployment import QUICK_FLAGS, Gateway, Launch

NUM_CONVERSATIONS = 100
NUM_TURNS = 5
NUM_CLIENTS = 8
ROOMY = (*SETTINGS[1:], "cache.num_blocks=6000")
"""Each replica could hold all conversations."""


def _converse(gateway: Gateway, index: int) -> tuple[int, int]:
    """Prompt tokens of all turns, and how many of them were cached."""
    messages = [{"role": "system", "content": f"You are assistant {index}. " + f"Rule {index} holds. " * 20}]
    num_tokens = num_cached_tokens = 0
    for turn in range(NUM_TURNS):
        messages.append({"role": "user", "content": f"Question {turn} of conversation {index}. " * 4})
        body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 12, "temperature": 0}
        status, answer = gateway.post("/v1/chat/completions", body)
        assert status == 200, answer
        usage = answer["usage"]
        num_tokens += usage["prompt_tokens"]
        num_cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return num_tokens, num_cached_tokens


@pytest.fixture(scope="module")
def hit_rate(launch: Launch, tiny_model: Path) -> Callable[[int, str], float]:
    def measure(num_workers: int, policy: str) -> float:
        flags = (*QUICK_FLAGS, "--policy", policy)
        deployment = launch.deployment(tiny_model, num_workers=num_workers, settings=ROOMY, flags=flags)
        with deployment as gateway, ThreadPoolExecutor(NUM_CLIENTS) as clients:
            counts = list(clients.map(lambda index: _converse(gateway, index), range(NUM_CONVERSATIONS)))
        num_tokens, num_cached_tokens = (sum(column) for column in zip(*counts, strict=True))
        return num_cached_tokens / num_tokens

    return measure


@pytest.mark.slow
def test_two_replicas_find_nearly_as_much_as_one_where_the_gateway_knows_their_caches(
    hit_rate: Callable[[int, str], float], record_property: Callable[[str, object], None]
) -> None:
    alone, aware, in_turn = hit_rate(1, "cache_aware"), hit_rate(2, "cache_aware"), hit_rate(2, "round_robin")
    record_property("hit_rates", {"one replica": alone, "two, cache-aware": aware, "two, round robin": in_turn})
    print(f"hit rates: one replica {alone:.3f}; two: cache-aware {aware:.3f}, round robin {in_turn:.3f}")
    assert aware >= 0.9 * alone
    assert in_turn < aware
