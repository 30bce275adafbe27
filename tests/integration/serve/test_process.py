"""The server process: readiness, drain, force."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator

import grpc
import pytest

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.client import GenerationClient
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub
from pagedkv.integration.serve.child_process import ChildServer
from pagedkv.plugin.errors import UnavailableError
from pagedkv.plugin.requests import SamplingParams

NUM_STREAMS = 10
NUM_TOKENS = 30


def _long(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)


def test_ready_line_tells_what_is_served(server: ChildServer) -> None:
    summary = server.summary
    assert summary["event"] == "ready"
    assert summary["backend"] == "paged"
    assert summary["architecture"] == "LlamaForCausalLM"
    assert summary["max_cache_tokens"] == summary["num_blocks"] * summary["block_size"] == 4096
    assert summary["max_total_tokens"] == 2048


def test_log_holds_the_resolved_config_once_and_never_a_prompt(server: ChildServer) -> None:
    async def ask() -> None:
        async with GenerationClient(server.target) as client:
            async for _ in client.generate("A secret that no log may hold", _long(2)):
                pass

    asyncio.run(ask())
    log = server.log.read_text()
    assert log.count("resolved config: ") == 1
    assert '"auto"' not in log.split("resolved config: ")[1].split('"server"')[0].replace(
        '"kernels": "auto"', ""
    ).replace('"decoder": "auto"', "")
    assert "secret" not in log


async def _count(tokens: AsyncIterator, started: asyncio.Event) -> int:
    num_tokens = 0
    async for _ in tokens:
        num_tokens += 1
        started.set()
    return num_tokens


async def _drain_under_load(server: ChildServer) -> list[int]:
    """Stops a server while streams run. Returns how many tokens each of them got."""
    async with GenerationClient(server.target) as client:
        started = [asyncio.Event() for _ in range(NUM_STREAMS)]
        streams = [
            asyncio.create_task(_count(client.generate(f"Story number {index}:", _long(NUM_TOKENS)), event))
            for index, event in enumerate(started)
        ]
        await asyncio.gather(*(event.wait() for event in started))
        await client.health()
        server.process.send_signal(signal.SIGTERM)
        await _until_unhealthy(client)
        with pytest.raises(UnavailableError, match="draining"):
            await _count(client.generate("Too late", _long(2)), asyncio.Event())
        return await asyncio.gather(*streams)


async def _until_unhealthy(client: GenerationClient) -> None:
    deadline_s = time.monotonic() + 10
    while await _is_healthy(client):
        assert time.monotonic() < deadline_s, "health does not flip while the server drains"
        await asyncio.sleep(0.01)
    with pytest.raises(UnavailableError, match="draining"):
        await client.health()


async def _is_healthy(client: GenerationClient) -> bool:
    try:
        await client.health()
    except UnavailableError:
        return False
    return True


def test_sigterm_lets_ten_running_requests_finish_and_refuses_new_ones(launch_server) -> None:
    with launch_server() as server:
        assert asyncio.run(_drain_under_load(server)) == [NUM_TOKENS] * NUM_STREAMS
        assert server.process.wait(timeout=20) == 0
        assert "every request had ended" in server.log.read_text()


async def _send_new_requests_beside_a_running_batch(server: ChildServer) -> tuple[str, int]:
    """What a router does that is told of the drain by nobody: the new request's text, the tokens of the running one."""

    def request(request_id: int) -> pb.Request:
        stopping = pb.StoppingCriteriaParameters(max_new_tokens=NUM_TOKENS, ignore_eos_token=True)
        parameters = pb.NextTokenChooserParameters(temperature=1, top_p=1, typical_p=1)
        text = "The capital of France is"
        return pb.Request(id=request_id, inputs=text, truncate=99, parameters=parameters, stopping_parameters=stopping)

    async with grpc.aio.insecure_channel(server.target) as channel, GenerationClient(server.target) as client:
        stub = TextGenerationServiceStub(channel)
        response = await stub.Prefill(pb.PrefillRequest(batch=pb.Batch(id=1, requests=[request(1)], size=1)))
        server.process.send_signal(signal.SIGTERM)
        await _until_unhealthy(client)
        new = pb.Batch(id=2, requests=[request(2)], size=1)
        response = await stub.Prefill(pb.PrefillRequest(batch=new, cached_batch=response.batch))
        (refused,) = [one for one in response.generations if one.request_id == 2]
        num_tokens = 1 + sum(one.request_id == 1 for one in response.generations)
        while response.HasField("batch"):
            response = await stub.Decode(pb.DecodeRequest(batches=[response.batch]))
            num_tokens += len(response.generations)
        return refused.generated_text.text, num_tokens


def test_new_requests_beside_a_running_batch_end_alone_in_a_drain(launch_server) -> None:
    with launch_server() as server:
        text, num_tokens = asyncio.run(_send_new_requests_beside_a_running_batch(server))
        assert "draining" in text
        assert num_tokens == NUM_TOKENS
        assert server.process.wait(timeout=20) == 0


async def _signal_during_a_stream(server: ChildServer, num_signals: int) -> None:
    async with GenerationClient(server.target) as client:
        started = asyncio.Event()
        stream = asyncio.create_task(_count(client.generate("On and on", _long(1900)), started))
        await started.wait()
        for _ in range(num_signals):
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
        with pytest.raises(UnavailableError):
            await stream


def test_second_sigterm_ends_the_server_at_once(launch_server) -> None:
    with launch_server() as server:
        started_s = time.monotonic()
        asyncio.run(_signal_during_a_stream(server, num_signals=2))
        assert server.process.wait(timeout=10) == 128 + signal.SIGTERM
        assert time.monotonic() - started_s < 10


def test_drain_that_runs_out_of_time_cuts_off_and_says_so(launch_server) -> None:
    with launch_server("--set", "server.drain_timeout_s=0.2") as server:
        asyncio.run(_signal_during_a_stream(server, num_signals=1))
        assert server.process.wait(timeout=20) == 1
        assert "cut off" in server.log.read_text()
