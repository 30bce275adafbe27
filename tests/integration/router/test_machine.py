"""The router's double as a state machine against real server processes, one and two."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from tokenizers import Tokenizer

from pagedkv.integration.serve.child_process import ChildServer

from .conftest import ServeTiny
from .double.router import Router
from .double.shards import Shards
from .double.streams import Ending
from .double.validation import Ask, Tokenize
from .idle import wait_until_nothing_is_held
from .machine import FLAGS, KINDS, PROMPTS, REFUSED_KINDS, SETTINGS, RouterMachine
from .recordings.rules import RULES

pytestmark = pytest.mark.slow

NUM_EXAMPLES = {1: 80, 2: 20}
NUM_EXAMPLES_BY_HAND = {1: 1200, 2: 800}
NUM_STEPS = 12
NEVER_SEEN = {"error-clears", "error-drops-all", "probe-until-well"}
"""Rules about failures, of which there are none."""


class _Server:
    """A server that is started again when it has ended, so that what ended it can be made smaller."""

    def __init__(self, serve_tiny: ServeTiny, num_shards: int, stack: ExitStack) -> None:
        self._serve_tiny = serve_tiny
        self._num_shards = num_shards
        self._stack = stack
        self._server: ChildServer | None = None

    def __call__(self) -> ChildServer:
        if self._server is None or self._server.process.poll() is not None:
            self._server = self._stack.enter_context(self._serve_tiny(*SETTINGS, num_shards=self._num_shards))
        return self._server


@pytest.fixture(scope="module")
def servers(serve_tiny: ServeTiny) -> Iterator[dict[int, _Server]]:
    """By their number of shards; they start when they are needed."""
    with ExitStack() as stack:
        yield {num_shards: _Server(serve_tiny, num_shards, stack) for num_shards in (1, 2)}


@pytest.fixture(scope="module")
def tokenize(tiny_tokenizer: Tokenizer) -> Tokenize:
    return lambda text, add_special_tokens: tiny_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


async def _stream_beside_probes_and_refusals(server: ChildServer, tokenize: Tokenize) -> None:
    delays_s = cycle([0.0, 0.002, 0.0, 0.0, 0.004, 0.001, 0.003])
    router = Router(Shards(server.target, lambda rank: next(delays_s)), tokenize, FLAGS)
    await router.start()
    streams = [router.submit(Ask(f"stream number {index} of twelve", max_new_tokens=24)) for index in range(12)]
    for turn in range(30):
        if turn % 5 == 0:
            streams.append(router.submit(Ask(f"{turn} can't be done", max_new_tokens=4, regex="[0-9]")))
        router.doubt_health()
        _, is_well = await asyncio.gather(router.turn(), router.health())
        assert is_well, [call.error for call in router.shards.calls if call.error]
    await router.run()
    await router.shards.close()
    assert [stream.ending for stream in streams] == [Ending.FINISHED] * len(streams)
    assert [call.error for call in router.shards.calls if call.error] == []


def test_two_shards_decide_alike_beside_probes_and_refused_requests(servers, tokenize: Tokenize) -> None:
    """Calls that go out together reach the shards in no order."""
    server = servers[2]()
    asyncio.run(_stream_beside_probes_and_refusals(server, tokenize))
    wait_until_nothing_is_held(server.summary["metrics_urls"])


def _walk(machine: RouterMachine) -> None:
    """One example by hand, in which everything happens."""
    try:
        machine.start(0)
        machine.submit(PROMPTS[0], "greedy", 20)
        machine.leave_amid_an_answer(2, 1)
        for kind in sorted(KINDS):
            for prompt in PROMPTS[-2:]:
                machine.submit(prompt, kind, 20)
        for kind in sorted(REFUSED_KINDS):
            machine.submit_what_can_not_be_done(PROMPTS[1], kind)
        for _ in range(4):
            machine.turn(6, [0])
            machine.check_health(1, [0])
            machine.check_health_in_doubt(3, [0, 0.002, 0.001])
            machine.leave_amid_an_answer(2, 3)
        machine.submit_a_crowd(PROMPTS[3], 12)
    finally:
        machine.teardown()


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.timeout(3 * 3600)
def test_no_order_of_a_router_s_calls_fails_stalls_or_leaks(servers, tokenize: Tokenize, num_shards: int) -> None:
    parts = {"server": servers[num_shards], "tokenize": staticmethod(tokenize), "alone": {}, "seen": set()}
    machine = type("Machine", (RouterMachine,), parts)
    is_by_hand = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
    _walk(machine())
    unseen = set(RULES) - machine.seen - NEVER_SEEN
    assert unseen == ({"every-shard"} if num_shards == 1 else set())
    examples = NUM_EXAMPLES_BY_HAND if is_by_hand else NUM_EXAMPLES
    run_state_machine_as_test(
        machine,
        settings=settings(
            settings(),
            max_examples=examples[num_shards],
            stateful_step_count=NUM_STEPS,
            suppress_health_check=list(HealthCheck),
        ),
    )
