"""`server.protocols`: each alone, both on one port, and what can't be together.

Which test holds what a worker of the gateway must not do:

- listen before it is warm: `test_a_gateway_s_worker_listens_once_it_is_warm`
- leave stop strings to the gateway; ignore a constraint: `tests/adapters/smg/test_generate.py`
- hear only one of Abort and cancellation; send anything before the admission: `tests/adapters/smg/test_ends.py`
- send clients away that ping: `tests/adapters/rpc/test_keepalive.py`
- count cached blocks as load: `tests/adapters/smg/test_worker.py`
- keep streams of KV events open while it drains: `test_a_gateway_s_worker_speaks_no_other_protocol_and_drains`
- take a position of the process before for its own: `tests/adapters/smg/test_kv_events.py`
- end for a reason that the gateway does not know: every answer that the tests of `tests/adapters/smg` read
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagedkv.adapters.smg import engine_pb2 as pb
from pagedkv.adapters.tgi.client import GenerationClient
from pagedkv.integration.serve.own_processes import find_free_ports
from pagedkv.plugin.config import parse_config
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.requests import SamplingParams

PROMPT_IDS = [504, 3575, 282, 4649, 314]
SMG = "vllm.grpc.engine.VllmEngine"


async def _generate(channel: grpc.aio.Channel, max_tokens: int, request_id: str = "r") -> list[int]:
    params = pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    request = pb.GenerateRequest(
        request_id=request_id, tokenized=pb.TokenizedInput(input_ids=PROMPT_IDS), sampling_params=params, stream=True
    )
    call = channel.unary_stream(
        f"/{SMG}/Generate",
        request_serializer=pb.GenerateRequest.SerializeToString,
        response_deserializer=pb.GenerateResponse.FromString,
    )(request)
    return [token_id async for message in call for token_id in message.chunk.token_ids]


async def _health(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


def _serve(launch_server: Any, protocol: str) -> Any:
    return launch_server("--protocol", protocol, "--listen", "127.0.0.1:0", uds_path=False)


def test_both_protocols_share_a_port_and_a_backend(launch_server: Any) -> None:
    async def play(target: str) -> None:
        async with grpc.aio.insecure_channel(target) as channel, GenerationClient(target) as client:
            alone = await _generate(channel, 24)

            async def text() -> list[int]:
                params = SamplingParams(max_new_tokens=24, ignore_eos=True)
                return [token.token_id async for token in client.generate("The capital of France is", params)]

            beside = await text()
            mixed = await asyncio.gather(text(), _generate(channel, 24, "a"), text(), _generate(channel, 24, "b"))
            assert mixed == [beside, alone, beside, alone]
            serving = health_pb2.HealthCheckResponse.SERVING
            names = ("", SMG, "generate.v3.TextGenerationService")
            assert [await _health(channel, name) for name in names] == [serving] * 3

    with _serve(launch_server, "tgi,smg") as server:
        asyncio.run(play(server.target))
        assert server.stop() == 0


def test_a_gateway_s_worker_speaks_no_other_protocol_and_drains(launch_server: Any) -> None:
    async def play(server: Any) -> list[int]:
        async with grpc.aio.insecure_channel(server.target) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/generate.v3.TextGenerationService/Info")(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            events = channel.unary_stream(f"/{SMG}/SubscribeKvEvents")(b"")
            running = asyncio.create_task(_generate(channel, 60))
            await events.read()
            await asyncio.sleep(0.2)
            server.process.terminate()
            tokens = await running
            while await events.read() is not grpc.aio.EOF:
                pass
            return tokens

    with _serve(launch_server, "smg") as server:
        assert len(asyncio.run(play(server))) == 60
        assert server.process.wait(30) == 0


@pytest.mark.slow
def test_a_gateway_s_worker_listens_once_it_is_warm(launch_server: Any) -> None:
    """Whoever connects at the first moment at which it can is served."""
    (port,) = find_free_ports(1)
    seen: list[tuple[bool, list[int]]] = []

    async def ask() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = channel.unary_unary(f"/{SMG}/HealthCheck", response_deserializer=pb.HealthCheckResponse.FromString)
            seen.append(((await health(b"")).healthy, await _generate(channel, 3)))

    def connect() -> None:
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
                break
            time.sleep(0.002)
        asyncio.run(ask())

    thread = threading.Thread(target=connect)
    thread.start()
    with launch_server("--protocol", "smg", "--listen", f"127.0.0.1:{port}", uds_path=False):
        thread.join()
    ((is_healthy, tokens),) = seen
    assert is_healthy
    assert len(tokens) == 3


@pytest.mark.parametrize(
    ("server", "word"),
    [
        ({"protocols": "smg", "uds_path": "/tmp/x"}, "TCP"),
        ({"protocols": "smg,smg"}, "twice"),
        ({"protocols": "vllm"}, "protocols"),
        ({"protocols": []}, "protocols"),
    ],
)
def test_protocols_that_can_not_be_served_are_refused(server: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        parse_config({"server": server})
