"""The router's double as a state machine: clients come and go in any order, health is asked for beside the loop's
calls, and every stream gets what its request gets alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import cycle
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pagedkv.integration.serve.child_process import ChildServer

from .double.router import Router
from .double.shards import Shards
from .double.streams import Ending, Stream
from .double.validation import Ask, RouterFlags, Tokenize
from .idle import wait_until_nothing_is_held
from .recordings.checker import check_recording

SETTINGS = (
    "cache.num_blocks=24",
    "cache.overcommit=2",
    "limits.max_total_tokens=128",
    "scheduler.max_num_sequences=8",
)
"""Few blocks and places, so that all of it is full now and then: blocks are preempted, admitted requests wait."""

FLAGS = RouterFlags(max_batch_prefill_tokens=48, max_piece_tokens=16)

_SHARED = ("one and the other one went on in the rain ", "when the king of then went there, ")
PROMPTS = ("a", "Z9", *_SHARED, *(f"{shared}{rest}" for shared in _SHARED for rest in ("on", "in the end " * 4, "7")))

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "all of the room": {"max_new_tokens": None},
    "one token": {"max_new_tokens": 1},
    "a piece": {"max_new_tokens": 16},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 1},
    "sampled otherwise": {"do_sample": True, "typical_p": 0.9, "seed": 2**64 - 1},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "stop": {"stop": ("e", "01")},
    "a model's name": {"model": "demo"},
    "the model's name": {"model": "tgi"},
    "temperature beyond 32 bits": {"do_sample": True, "temperature": 1e39, "seed": 3},
    "repetition_penalty beyond 32 bits": {"repetition_penalty": 1e39},
    "truncate": {"truncate": 3},
    "prompt log-probabilities": {"decoder_input_details": True, "top_n_tokens": 5},
    "watermark": {"watermark": True},
    "no special tokens": {"add_special_tokens": False},
}
REFUSED_KINDS: dict[str, dict[str, Any]] = {
    "regex": {"regex": "[0-9]{3}"},
    "invalid regex": {"regex": "[0-9"},
}
"""What the server can't do yet. It may do it or end it in its first answer, and that alone."""

_DELAYS_S = st.lists(st.sampled_from([0, 0, 0, 0.001, 0.004]), min_size=1, max_size=4)


class RouterMachine(RuleBasedStateMachine):
    """One router's life in front of a server that outlives it."""

    server: ClassVar[Callable[[], ChildServer]]
    """Starts one, if none runs."""
    tokenize: ClassVar[Tokenize]
    alone: ClassVar[dict[Ask, Stream]]
    """What each request got alone, of all examples of this server."""
    seen: ClassVar[set[str]]
    """The rules of the router's calls that some example could have broken."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        self._target = type(self).server()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(coroutine)

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self._streams: list[tuple[Ask, Stream]] = []
        self._routers: list[Router] = []
        self._run(self._start_router(seed))

    async def _start_router(self, seed: int) -> None:
        router = Router(Shards(self._target.target), type(self).tokenize, FLAGS, seed)
        self._routers.append(router)
        await router.start()
        self._router = router

    @rule(
        prompt=st.sampled_from(PROMPTS), kind=st.sampled_from(sorted(KINDS)), max_new_tokens=st.sampled_from([2, 6, 20])
    )
    def submit(self, prompt: str, kind: str, max_new_tokens: int) -> None:
        self._submit(Ask(**{"inputs": prompt, "max_new_tokens": max_new_tokens, **KINDS[kind]}))

    @rule(prompt=st.sampled_from(PROMPTS), num_copies=st.integers(2, 12))
    def submit_a_crowd(self, prompt: str, num_copies: int) -> None:
        for copy in range(num_copies):
            self._submit(Ask(prompt + str(copy % 2), max_new_tokens=8))

    @rule(prompt=st.sampled_from(PROMPTS), kind=st.sampled_from(sorted(REFUSED_KINDS)))
    def submit_what_can_not_be_done(self, prompt: str, kind: str) -> None:
        self._submit(Ask(prompt, max_new_tokens=5, **REFUSED_KINDS[kind]))

    def _submit(self, ask: Ask) -> None:
        self._streams.append((ask, self._router.submit(ask)))

    @precondition(lambda self: self._streams)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        live = [stream for _, stream in self._streams if stream.ending is None]
        if live:
            data.draw(st.sampled_from(live)).leave()

    @precondition(lambda self: self._streams)
    @rule(num_turns=st.integers(1, 4), every=st.integers(1, 3))
    def leave_amid_an_answer(self, num_turns: int, every: int) -> None:
        """Clients that have got something go away, which the router notices at their next generation."""
        self.turn(num_turns, [0])
        served = [stream for _, stream in self._streams if stream.ids and stream.ending is None]
        for stream in served[::every]:
            stream.leave()
        self.turn(1, [0])

    @rule(num_turns=st.integers(1, 6), delays_s=_DELAYS_S)
    def turn(self, num_turns: int, delays_s: list[float]) -> None:
        self._delay(delays_s)
        for _ in range(num_turns):
            self._run(self._router.turn())

    @rule(num_checks=st.integers(1, 3), delays_s=_DELAYS_S)
    def check_health(self, num_checks: int, delays_s: list[float]) -> None:
        self._delay(delays_s)
        self._run(self._beside_a_turn([self._router.health() for _ in range(num_checks)]))

    @rule(num_checks=st.integers(1, 3), delays_s=_DELAYS_S)
    def check_health_in_doubt(self, num_checks: int, delays_s: list[float]) -> None:
        """As after an error in some stream, the last of which may be long ago."""
        self._router.doubt_health()
        self.check_health(num_checks, delays_s)

    async def _beside_a_turn(self, checks: list[Coroutine[Any, Any, bool]]) -> None:
        _, *are_well = await asyncio.gather(self._router.turn(), *checks)
        assert all(are_well), [call.error for call in self._router.shards.calls if call.error]

    def _delay(self, delays_s: list[float]) -> None:
        ring = cycle(delays_s)
        self._router.shards.delay_s = lambda rank: next(ring)

    @precondition(lambda self: len(self._routers) < 3)
    @rule(is_amid_a_call=st.booleans(), seed=st.integers(0, 2**32))
    def restart_the_router(self, is_amid_a_call: bool, seed: int) -> None:
        """Its clients are gone; the next one clears the cache first."""
        self._run(self._end_router(is_amid_a_call))
        for _, stream in self._streams:
            stream.leave()
        self._run(self._start_router(seed))

    async def _end_router(self, is_amid_a_call: bool) -> None:
        if is_amid_a_call:
            turn = asyncio.create_task(self._router.turn())
            await asyncio.sleep(0.001)
            turn.cancel()
            await asyncio.gather(turn, return_exceptions=True)
            # What it broke off is no error of the server.
            self._router.shards.calls = [call for call in self._router.shards.calls if not _is_broken_off(call)]
        await self._router.shards.close()

    def teardown(self) -> None:
        try:
            if hasattr(self, "_router"):
                self._run(self._router.run())
                self._check()
                self._run(self._check_alone())
        finally:
            for router in getattr(self, "_routers", ()):
                self._run(router.shards.close())
            self._loop.close()

    def _check(self) -> None:
        assert self._run(self._router.health())
        wait_until_nothing_is_held(self._target.summary["metrics_urls"])
        for router in self._routers:
            assert [call.error for call in router.shards.calls if call.error is not None] == []
            tally = check_recording(router.recording())
            self.seen.update(tally.num_checks.keys())
            # Doubts are not in a recording.
            violations = [violation for violation in tally.violations if violation.rule != "probe-after-failure"]
            assert violations == []
        for ask, stream in self._streams:
            assert stream.ending in (Ending.FINISHED, Ending.LEFT), (ask, stream)

    async def _check_alone(self) -> None:
        for ask, stream in self._streams:
            if ask.regex is not None:
                continue
            if ask not in self.alone:
                self.alone[ask] = self._router.submit(ask)
                await self._router.run()
            alone = self.alone[ask]
            assert alone.ending is Ending.FINISHED
            if stream.ending is Ending.LEFT:
                assert stream.ids == alone.ids[: len(stream.ids)], ask
            else:
                assert (stream.ids, stream.text, stream.finish_reason) == (
                    alone.ids,
                    alone.text,
                    alone.finish_reason,
                ), ask
                assert [id_ for id_, _, _ in stream.prefill] == [id_ for id_, _, _ in alone.prefill]


def _is_broken_off(call: Any) -> bool:
    return call.answer is None and call.error is None
