"""Requests that end before their time: Abort, cancellation, failed steps, a draining worker."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from pagedkv.adapters.smg import engine_pb2 as pb
from pagedkv.plugin.errors import StepError
from pagedkv.plugin.observer import Refusal

PROMPT = [5, 9, 2, 77]


def test_abort_ends_a_stream_as_abort_and_frees_its_blocks(lab, run) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            call = wire.stream("Generate", lab.ask(PROMPT, 480, ignore_eos=True), timeout=60)
            await call.read()
            await wire.call("Abort", pb.AbortRequest(request_ids=["unknown", "r"]))
            rest = await wire.rest_of(call)
            assert rest[-1].complete.finish_reason == "abort"
            await wire.until_idle()
            await wire.call("Abort", pb.AbortRequest(request_ids=["r", "r"]))

    run(play())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_leaves_nothing_behind(lab, run, stream: bool) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            calls = [
                wire.stream(
                    "Generate", lab.ask(PROMPT, 480, ignore_eos=True, stream=stream, n=2, request_id=str(i)), timeout=60
                )
                for i in range(4)
            ]
            while wire.loop.num_live < 8:
                await asyncio.sleep(0.005)
            for call in calls:
                call.cancel()
            await wire.until_idle()

    run(play())


def test_abort_and_cancellation_together_free_once(lab, run) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            call = wire.stream("Generate", lab.ask(PROMPT, 480, ignore_eos=True), timeout=60)
            await call.read()
            await wire.call("Abort", pb.AbortRequest(request_ids=["r"]))
            call.cancel()
            await wire.until_idle()

    run(play())


def test_a_failed_step_ends_its_requests_and_the_next_one_is_served(lab, run, monkeypatch) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            execute = wire.backend._executor.run
            failures = iter([True])

            def fail_once(plan, sequences):
                if next(failures, False):
                    raise RuntimeError("the device is on fire")
                return execute(plan, sequences)

            monkeypatch.setattr(wire.backend._executor, "run", fail_once)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await wire.generate(lab.ask(PROMPT, 4, n=3))
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            await wire.until_idle()
            messages = await wire.generate(lab.ask(PROMPT, 4, ignore_eos=True, request_id="s"))
            assert messages[-1].complete.finish_reason == "length"

    run(play())


def test_steps_that_fail_again_and_again_make_the_worker_unhealthy(lab, run, monkeypatch) -> None:
    async def play() -> None:
        async with lab.serve() as wire:

            def fail(plan, sequences):
                raise StepError("broken", [])

            monkeypatch.setattr(wire.backend._executor, "run", fail)
            for i in range(5):
                with pytest.raises(grpc.aio.AioRpcError):
                    await wire.generate(lab.ask(PROMPT, 4, request_id=str(i)))
            health = await wire.call("HealthCheck", pb.HealthCheckRequest())
            assert not health.healthy
            assert "failed" in health.message

    run(play())


def test_a_draining_worker_refuses_new_requests_and_finishes_running_ones(lab, run) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            call = wire.stream("Generate", lab.ask(PROMPT, 60, ignore_eos=True), timeout=60)
            first = await call.read()
            wire.loop.begin_drain()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await wire.generate(lab.ask(PROMPT, 4, request_id="late"))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            rest = await wire.rest_of(call)
            num_tokens = len(first.chunk.token_ids) + sum(len(message.chunk.token_ids) for message in rest)
            assert (num_tokens, rest[-1].complete.finish_reason) == (60, "length")

    run(play())


def test_nothing_is_sent_before_the_request_is_admitted(lab, run) -> None:
    """A failure before the first message has an HTTP status and may be repeated elsewhere."""

    async def play() -> None:
        async with lab.serve() as wire:
            release = asyncio.Event()
            running = asyncio.get_running_loop()
            wire.loop._thread.post(lambda: asyncio.run_coroutine_threadsafe(release.wait(), running).result())
            call = wire.stream("Generate", lab.ask(PROMPT, 4, ignore_eos=True), timeout=60)
            metadata = asyncio.ensure_future(call.initial_metadata())
            done, _ = await asyncio.wait([metadata], timeout=0.2)
            assert not done
            release.set()
            assert [message async for message in call]

    run(play())


def test_an_abort_that_overtakes_the_admission_counts(lab, run) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            release = asyncio.Event()
            running = asyncio.get_running_loop()
            wire.loop._thread.post(lambda: asyncio.run_coroutine_threadsafe(release.wait(), running).result())
            call = wire.stream("Generate", lab.ask(PROMPT, 480, ignore_eos=True), timeout=60)
            while "r" not in wire.worker._generations:
                await asyncio.sleep(0.005)
            await wire.call("Abort", pb.AbortRequest(request_ids=["r"]))
            release.set()
            assert [message async for message in call][-1].complete.finish_reason == "abort"
            await wire.until_idle()

    run(play())


def test_one_id_at_the_same_time_is_refused_and_free_again_afterwards(lab, run) -> None:
    async def play() -> None:
        async with lab.serve() as wire:
            asked = [lab.ask(PROMPT, 40, ignore_eos=True) for _ in range(2)]
            answers = await asyncio.gather(*map(wire.generate, asked), return_exceptions=True)
            (refused,) = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
            assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (await wire.generate(asked[0]))[-1].complete.finish_reason == "length"
            assert wire.observer.refusals == [Refusal.DUPLICATE]
            await wire.until_idle()

    run(play())


def test_observers_hear_of_refusals_by_reason_and_of_ends_by_the_gateway_s_id(lab, run) -> None:
    refused = {
        Refusal.UNSUPPORTED: {"json_object": True},
        Refusal.INVALID: {"temperature": -1.0},
        Refusal.TOO_LONG: {"max_tokens": 600},
    }

    async def play() -> None:
        async with lab.serve(max_live_samples=2) as wire:
            for params in refused.values():
                with pytest.raises(grpc.aio.AioRpcError):
                    await wire.generate(lab.ask(PROMPT, **{"max_tokens": 4, **params}))
            with pytest.raises(grpc.aio.AioRpcError):
                await wire.generate(lab.ask(PROMPT, 4, n=3))
            await wire.generate(lab.ask(PROMPT, 4, request_id="x-1", ignore_eos=True))
            wire.loop.begin_drain()
            with pytest.raises(grpc.aio.AioRpcError):
                await wire.generate(lab.ask(PROMPT, 4))
            assert wire.observer.refusals == [*refused, Refusal.OVERLOADED, Refusal.DRAINING]
            assert [(end.external_id, end.outcome.value) for end in wire.observer.ends] == [("x-1", "length")]

    run(play())
