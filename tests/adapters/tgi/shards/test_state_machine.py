"""Two shards under calls that arrive on each at other times: what is generated is what one process generates.

HYPOTHESIS_PROFILE=thorough pytest tests/adapters/tgi/shards/test_state_machine.py
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from pagedkv.adapters.tgi import generate_pb2 as pb

from .shard_client import Host, expected_tokens, make_prefill, make_request, wait_until

NUM_FAST_EXAMPLES = 6
NUM_THOROUGH_EXAMPLES = 300
MAX_BATCHES = 3
MAX_NEW_TOKENS = 12
PROBE_ID = 2**64 - 1

delays = st.tuples(*[st.sampled_from([0.0, 0.001, 0.003, 0.01, 0.03])] * 2)
texts = st.text("abcd", min_size=1, max_size=20)


@dataclass
class LiveRequest:
    expected: list[int]
    tokens: list[int] = field(default_factory=list)


@dataclass
class LiveBatch:
    cached: pb.CachedBatch
    requests: dict[int, LiveRequest]


class ShardsMachine(RuleBasedStateMachine):
    """Each rule makes several calls at once, on batches of their own, and checks every answer."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host
        self._stack = ExitStack()
        options = {"num_blocks": 60, "max_delay_s": 0.005, "claim_timeout_s": 0.5}
        self._shards = self._stack.enter_context(host.running(terminated_rank=None, **options))
        self._threads = self._stack.enter_context(ThreadPoolExecutor(MAX_BATCHES + 2))
        self._batches: dict[int, LiveBatch] = {}
        self._is_draining = False
        self._last_id = 0

    @rule(data=st.data())
    def call_at_once(self, data: st.DataObject) -> None:
        free = list(self._batches)
        calls: list[Callable[[], None]] = []
        for _ in range(data.draw(st.integers(1, 4), "calls")):
            kind = data.draw(
                st.sampled_from(["prefill", "decode", "decode", "filter", "clear", "gone", "probe", "refused"])
            )
            calls += getattr(self, f"_{kind}")(data, free)
        for ended in [self._threads.submit(call) for call in calls]:
            ended.result()

    @precondition(lambda self: self._batches)
    @rule(data=st.data())
    def call_one_shard_alone(self, data: st.DataObject) -> None:
        """It is refused on rank 1, and changes nothing; nobody waits for it."""
        batch = self._batches[data.draw(st.sampled_from(sorted(self._batches)))]
        (answer,) = self._shards.call("Decode", pb.DecodeRequest(batches=[batch.cached]), ranks=[1])
        assert answer.code() is grpc.StatusCode.UNAVAILABLE

    @precondition(lambda self: not self._is_draining)
    @rule(rank=st.integers(0, 1))
    def drain(self, rank: int) -> None:
        self._is_draining = True
        os.kill(self._shards.pids[rank], signal.SIGTERM)
        if self._batches:  # Else they are gone at once.
            for each in range(2):
                wait_until(
                    lambda each=each: isinstance(
                        self._shards.call("Health", pb.HealthRequest(), ranks=[each])[0], Exception
                    )
                )

    def teardown(self) -> None:
        try:
            while self._batches:
                for batch in list(self._batches.values()):
                    self._run_decode([batch], (0.0, 0.001))
            if not self._is_draining:
                os.kill(self._shards.pids[1], signal.SIGTERM)
        finally:
            self._stack.close()
        self._host.check_good_end()

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _prefill(self, data: st.DataObject, free: list[int]) -> list[Callable[[], None]]:
        if self._is_draining or len(self._batches) >= MAX_BATCHES:
            return []
        batch_id, when = self._next_id(), data.draw(delays)
        requests, live = [], {}
        for _ in range(data.draw(st.integers(1, 2))):
            request_id, text = self._next_id(), data.draw(texts)
            num_tokens = data.draw(st.integers(1, MAX_NEW_TOKENS))
            requests.append(make_request(request_id, text, num_tokens))
            live[request_id] = LiveRequest(expected_tokens(text, num_tokens))
        running = None
        if free and data.draw(st.booleans(), "joins"):
            running = self._batches[free.pop()]
            live = {**running.requests, **live}
        batch = running or LiveBatch(pb.CachedBatch(id=batch_id), {})
        batch.requests = live
        self._batches[batch.cached.id] = batch
        prefill = make_prefill(batch_id, requests, running.cached if running else None)
        return [lambda: self._take(batch, self._shards.call("Prefill", prefill, when))]

    def _decode(self, data: st.DataObject, free: list[int]) -> list[Callable[[], None]]:
        named = [self._batches[free.pop()] for _ in range(min(len(free), data.draw(st.integers(1, 2))))]
        when = data.draw(delays)
        return [lambda: self._run_decode(named, when)] if named else []

    def _filter(self, data: st.DataObject, free: list[int]) -> list[Callable[[], None]]:
        if not free:
            return []
        batch, when = self._batches[free.pop()], data.draw(delays)
        kept = data.draw(st.lists(st.sampled_from(sorted(batch.requests)), min_size=1, unique=True), "kept")
        request = pb.FilterBatchRequest(batch_id=batch.cached.id, request_ids=kept)

        def run() -> None:
            first, second = self._shards.call("FilterBatch", request, when)
            assert first == second
            assert set(first.batch.request_ids) == set(kept)
            batch.cached, batch.requests = first.batch, {id_: batch.requests[id_] for id_ in kept}

        return [run]

    def _clear(self, data: st.DataObject, free: list[int]) -> list[Callable[[], None]]:
        if not free:
            return []
        batch, when = self._batches.pop(free.pop()), data.draw(delays)
        return [lambda: self._run_clear([batch.cached.id], when)]

    def _gone(self, data: st.DataObject, free: list[int]) -> list[Callable[[], None]]:
        """A client goes away in a call, from one shard before the other."""
        when, gone_after = data.draw(delays), data.draw(delays)
        if free and data.draw(st.booleans()):
            cached = self._batches.pop(free.pop()).cached
            return [lambda: self._go_away("Decode", pb.DecodeRequest(batches=[cached]), [cached.id], when, gone_after)]
        if self._is_draining:
            return []
        batch_id = self._next_id()
        prefill = make_prefill(batch_id, [make_request(self._next_id(), data.draw(texts), MAX_NEW_TOKENS)])
        return [lambda: self._go_away("Prefill", prefill, [batch_id], when, gone_after)]

    def _probe(self, data: st.DataObject, free: list[int]) -> list[Callable[[], None]]:
        prefill, when = make_prefill(PROBE_ID, [make_request(PROBE_ID, "liveness", 1)]), data.draw(delays)

        def run() -> None:
            answers = self._shards.call("Prefill", prefill, when)
            if self._is_draining:
                self._check_refused(answers, grpc.StatusCode.UNAVAILABLE)
            else:
                assert [answer.HasField("batch") for answer in answers] == [False] * 2
                tokens = [list(generation.tokens.ids) for answer in answers for generation in answer.generations]
                assert tokens == [expected_tokens("liveness", 1)]

        return [] if self._is_draining and not self._batches else [run]

    def _refused(self, data: st.DataObject, free: list[int]) -> list[Callable[[], None]]:
        if self._is_draining:
            return []
        when, unknown = data.draw(delays), pb.CachedBatch(id=self._next_id())
        prefill = make_prefill(self._next_id(), [make_request(self._next_id(), "text", 3)], unknown)
        method, request = data.draw(
            st.sampled_from(
                [
                    ("Prefill", prefill),
                    ("Decode", pb.DecodeRequest(batches=[unknown])),
                    ("FilterBatch", pb.FilterBatchRequest(batch_id=unknown.id, request_ids=[1])),
                ]
            )
        )
        return [lambda: self._check_refused(self._shards.call(method, request, when), grpc.StatusCode.NOT_FOUND)]

    def _run_decode(self, batches: Sequence[LiveBatch], when: tuple[float, ...]) -> None:
        request = pb.DecodeRequest(batches=[batch.cached for batch in batches])
        joined = batches[0]
        for other in batches[1:]:
            joined.requests = {**joined.requests, **other.requests}
            del self._batches[other.cached.id]
        self._take(joined, self._shards.call("Decode", request, when))

    def _take(self, batch: LiveBatch, answers: list[Any]) -> None:
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        assert not errors
        assert [answer.HasField("batch") for answer in answers] == [answers[0].HasField("batch")] * 2
        assert answers[0].batch == answers[1].batch
        generations = [generation for answer in answers for generation in answer.generations]
        ids = [generation.request_id for generation in generations]
        assert len(set(ids)) == len(ids)
        for generation in generations:
            live = batch.requests[generation.request_id]
            live.tokens += generation.tokens.ids
            assert live.tokens == live.expected[: len(live.tokens)]
            if generation.HasField("generated_text"):
                assert live.tokens == live.expected
                del batch.requests[generation.request_id]
        if batch.requests:
            assert set(answers[0].batch.request_ids) == set(batch.requests)
            batch.cached = answers[0].batch
        else:
            assert not answers[0].HasField("batch")
            del self._batches[batch.cached.id]

    def _go_away(
        self, method: str, request: Any, batch_ids: list[int], when: tuple[float, ...], after: tuple[float, ...]
    ) -> None:
        self._shards.call(method, request, when, cancel_after_s=after)
        self._run_clear(batch_ids, when[::-1])

    def _run_clear(self, batch_ids: list[int], when: tuple[float, ...]) -> None:
        for batch_id in batch_ids:
            answers = self._shards.call("ClearCache", pb.ClearCacheRequest(id=batch_id), when)
            assert answers == [pb.ClearCacheResponse()] * 2

    def _check_refused(self, answers: list[Any], code: grpc.StatusCode) -> None:
        assert [answer.code() for answer in answers] == [code] * 2
        assert answers[0].details() == answers[1].details()


def test_two_shards_generate_what_one_process_does_however_calls_arrive(host: Host) -> None:
    is_thorough = settings.default.max_examples > 100
    num_examples = NUM_THOROUGH_EXAMPLES if is_thorough else NUM_FAST_EXAMPLES
    run_state_machine_as_test(
        lambda: ShardsMachine(host),
        # Shrinking would replay races that do not come again, for minutes.
        settings=settings(max_examples=num_examples, stateful_step_count=12, phases=[Phase.generate]),
    )
