"""Records what a router and a server say to each other: a proxy between the two, run by hand.

    pagedkv serve MODEL --uds-path RUN/server
    python recorder.py RUN/server RUN/proxy fresh.jsonl --title "what was done" --flags --max-total-tokens 1024
    text-generation-router --master-shard-uds-path RUN/proxy-0 --max-total-tokens 1024 …

SIGINT ends it and writes the file. Clients' requests are not seen, so that rules about them are not checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.generate_pb2_grpc import TextGenerationServiceStub

SERVICE = "generate.v3.TextGenerationService"
MAX_TEXT_CHARACTERS = 6000
NUM_KEPT_CHARACTERS = 200
NUM_KEPT_DECODES = 2
"""Of a row of like Decodes, at its beginning; the last one is kept too."""

_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

Line = dict[str, Any]


class Recorder:
    """Passes calls on, and keeps each with its answer."""

    def __init__(self, listen: str) -> None:
        self.lines: list[Line] = []
        self._listen = listen
        self._begun_s = time.monotonic()
        self._parts: list[Any] = []

    async def start(self, server: str) -> None:
        """Opens a socket for each shard of a server."""
        async with grpc.aio.insecure_channel(f"unix:{server}-0") as channel:
            found = await TextGenerationServiceStub(channel).ServiceDiscovery(pb.ServiceDiscoveryRequest())
        for rank, url in enumerate(found.urls):
            channel = grpc.aio.insecure_channel(url.replace("unix://", "unix:"), _OPTIONS)
            proxy = grpc.aio.server(options=_OPTIONS)
            handlers = {method.name: self._handler(rank, channel, method.name) for method in _methods()}
            proxy.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
            proxy.add_insecure_port(f"unix:{self._listen}-{rank}")
            await proxy.start()
            self._parts += [proxy, channel]
        self._num_shards = len(found.urls)

    async def stop(self) -> None:
        for part in self._parts:
            await (part.close() if isinstance(part, grpc.aio.Channel) else part.stop(None))

    def write(self, path: Path, title: str, flags: list[str]) -> None:
        """One JSON object a line: a header, then the calls by time."""
        lines = sorted(self.lines, key=lambda line: line["at_ms"])
        if self._num_shards == 1:
            # Rows of several shards are woven together.
            lines = leave_out_like_decodes(lines)
        header = {"trace": path.stem, "title": title, "flags": flags}
        path.write_text(
            "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in [header, *lines]),
            encoding="utf-8",
        )

    def _handler(self, rank: int, channel: grpc.aio.Channel, method: str) -> grpc.RpcMethodHandler:
        call_server = getattr(TextGenerationServiceStub(channel), method)

        async def handle(request: Any, context: grpc.aio.ServicerContext) -> Any:
            line: Line = {"at_ms": self._now_ms(), "rank": rank, "call": method, "request": to_json(request)}
            try:
                answer = await self._answer(method, call_server, request)
                line["answer"] = to_json(answer)
            except grpc.aio.AioRpcError as error:
                line["error"] = f"{error.code().name}: {error.details()}"
                await context.abort(error.code(), error.details() or "")
            finally:
                self.lines.append({**line, "end_ms": self._now_ms()})
            return answer

        return grpc.unary_unary_rpc_method_handler(
            handle,
            request_deserializer=getattr(pb, f"{method}Request").FromString,
            response_serializer=getattr(pb, f"{method}Response").SerializeToString,
        )

    async def _answer(self, method: str, call_server: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
        if method == "ServiceDiscovery":
            urls = [f"unix://{self._listen}-{rank}" for rank in range(self._num_shards)]
            return pb.ServiceDiscoveryResponse(urls=urls)
        return await call_server(request)

    def _now_ms(self) -> float:
        return round((time.monotonic() - self._begun_s) * 1000, 1)


def _methods() -> Any:
    return pb.DESCRIPTOR.services_by_name["TextGenerationService"].methods


def to_json(message: Any) -> Any:
    """A message with long texts and images cut."""
    return _cut(json_format.MessageToDict(message, preserving_proto_field_name=True))


def _cut(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _cut(part, key) for key, part in value.items()}
    if isinstance(value, list):
        return [_cut(part) for part in value]
    if not isinstance(value, str):
        return value
    if key == "data":
        return f"<{len(value)} characters of base64>"
    return value if len(value) <= MAX_TEXT_CHARACTERS else f"{value[:NUM_KEPT_CHARACTERS]}<{len(value)} characters>"


def leave_out_like_decodes(lines: list[Line]) -> list[Line]:
    """Of a row of Decodes of the same batch that answer it too, the first ones and the last stay."""
    kept: list[Line] = []
    row: list[Line] = []
    for line in [*lines, {}]:
        if line and _changes_nothing(line) and (not row or line["request"] == row[0]["request"]):
            row.append(line)
            continue
        num_left_out = len(row) - NUM_KEPT_DECODES - 1
        if num_left_out > 0:
            row = [*row[:NUM_KEPT_DECODES], {"left_out": f"{num_left_out} like Decodes"}, row[-1]]
        kept += row
        row = [line] if line and _changes_nothing(line) else []
        kept += [line] if line and not row else []
    return kept


def _changes_nothing(line: Line) -> bool:
    return line["call"] == "Decode" and [line.get("answer", {}).get("batch")] == line["request"]["batches"]


async def _record(arguments: argparse.Namespace) -> None:
    recorder = Recorder(str(arguments.listen))
    await recorder.start(str(arguments.server))
    print(f"recording; tell the router --master-shard-uds-path {arguments.listen}-0", flush=True)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()
    await recorder.stop()
    recorder.write(arguments.out, arguments.title, arguments.flags)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", type=Path, help="the server's --uds-path")
    parser.add_argument("listen", type=Path, help="of the proxy; -RANK is appended")
    parser.add_argument("out", type=Path, help="the recording")
    parser.add_argument("--title", default="")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="the router's numbers, last")
    asyncio.run(_record(parser.parse_args()))


if __name__ == "__main__":
    main()
