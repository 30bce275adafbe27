"""Runs pagedkv's server in a separate process, and streams from it as the SMG gateway does: a call for each request."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import grpc

from pagedkv.adapters.smg import engine_pb2 as pb
from pagedkv.adapters.smg.handlers import SERVICE_NAME
from pagedkv.plugin.config import DEFAULT_MAX_MESSAGE_BYTES

from .own_server import describe_server, own_server
from .protocol import Recorder, RunEngine, RunRequest


class SmgEngine(RunEngine):
    def __init__(self, options: dict[str, Any]) -> None:
        """Starts the server. `options` are those of `InProcessEngine`."""
        self._stack = ExitStack()
        arguments = ["--protocol", "smg", "--listen", "127.0.0.1:0"]
        server = self._stack.enter_context(own_server(options, arguments))
        self._target = server.target
        self.info = describe_server(server, "smg")
        self._num_runs = 0

    def run(self, recorder: Recorder) -> dict[str, Any]:
        asyncio.run(self._run(recorder))
        return {}

    def close(self) -> None:
        self._stack.close()

    async def _run(self, recorder: Recorder) -> None:
        self._num_runs += 1
        messages = [self._to_message(index, request) for index, request in enumerate(recorder.requests)]
        limits = [("grpc.max_receive_message_length", DEFAULT_MAX_MESSAGE_BYTES)]
        async with grpc.aio.insecure_channel(self._target, options=limits) as channel:
            await channel.channel_ready()
            generate = channel.unary_stream(
                f"/{SERVICE_NAME}/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
            )
            recorder.restart_clock()
            streams = []
            for index, message in enumerate(messages):
                wait_s = recorder.requests[index].arrival_s - recorder.now_s
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                streams.append(asyncio.ensure_future(self._stream(recorder, index, generate(message))))
            await asyncio.gather(*streams)

    @staticmethod
    async def _stream(recorder: Recorder, index: int, call: Any) -> None:
        async for response in call:
            if response.HasField("chunk"):
                recorder.count(index, len(response.chunk.token_ids), response.chunk.cached_tokens)

    def _to_message(self, index: int, request: RunRequest) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            request_id=f"{self._num_runs}-{index}",
            tokenized=pb.TokenizedInput(input_ids=request.prompt_ids),
            sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=request.max_new_tokens, ignore_eos=True),
            stream=True,
        )


def load(options: dict[str, Any]) -> SmgEngine:
    return SmgEngine(options)
