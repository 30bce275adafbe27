"""Calls that a router made, in memory and as the lines of a recording."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from pagedkv.adapters.tgi import generate_pb2 as pb

PROBE_ID = 2**64 - 1
"""Of the batch and of the request of a health Prefill."""

DEFAULT_MAX_PIECE_TOKENS = 1024
DEFAULT_FLAGS = {"--max-batch-prefill-tokens": 4096, "--max-stop-sequences": 4, "--max-top-n-tokens": 5}


@dataclass(frozen=True)
class Call:
    """One gRPC call to one shard."""

    begin_ms: float
    end_ms: float
    rank: int
    method: str
    request: Any
    """The protobuf message. Of a recording from a file, long texts are cut and images are empty."""
    answer: Any
    """The protobuf message, or None where there is an error."""
    error: str | None = None

    @property
    def is_probe(self) -> bool:
        return self.method == "Prefill" and self.request.batch.id == PROBE_ID


@dataclass(frozen=True)
class HttpEvent:
    """What a client did or got."""

    at_ms: float
    kind: str
    """post, get, answered, or gone."""
    body: dict[str, Any] = field(default_factory=dict)


@dataclass
class Recording:
    """Calls by the time at which they began, beside what clients did."""

    name: str
    flags: dict[str, int] = field(default_factory=dict)
    """Those of the router, with its defaults."""
    calls: list[Call] = field(default_factory=list)
    events: list[HttpEvent] = field(default_factory=list)
    max_piece_tokens: int = DEFAULT_MAX_PIECE_TOKENS

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Reads a file with one JSON object a line. Raises ValueError where a line is of no known kind."""
        header, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        recording = cls(header["trace"], read_flags(header["flags"]))
        for line in lines:
            if "call" in line:
                recording.calls.append(_read_call(line))
            elif "http" in line:
                recording.events.append(HttpEvent(line["at_ms"], line["http"], line.get("body", {})))
            elif "left_out" not in line:
                raise ValueError(f"{path.name} has a line of no known kind: {line}")
        recording.calls.sort(key=lambda call: call.begin_ms)
        return recording


def read_flags(arguments: list[str]) -> dict[str, int]:
    """The numbers that the router was told on its command line, over its defaults."""
    return {**DEFAULT_FLAGS, **{name: int(value) for name, value in zip(arguments[::2], arguments[1::2], strict=True)}}


def _read_call(line: dict[str, Any]) -> Call:
    method = line["call"]
    answer = None
    if "answer" in line:
        answer = json_format.ParseDict(line["answer"], getattr(pb, f"{method}Response")())
    return Call(
        line["at_ms"],
        line["end_ms"],
        line["rank"],
        method,
        json_format.ParseDict(_mend(line["request"]), getattr(pb, f"{method}Request")()),
        answer,
        line.get("error"),
    )


def _mend(value: Any) -> Any:
    """What a recording cuts and a message can't hold: an image's bytes are left out; slots go on as the blocks say, up
    to the number of which the cut tells."""
    if isinstance(value, list):
        return [_mend(part) for part in value]
    if not isinstance(value, dict):
        return value
    mended = {key: "" if key == "data" else _mend(part) for key, part in value.items()}
    slots = mended.get("slots", [])
    if slots and isinstance(slots[-1], str):
        num_slots = int(slots.pop().strip("<").split()[0])
        num_blocks = len(mended["blocks"])
        block_size = -(-num_slots // num_blocks)
        while (num_slots - 1) // block_size + 1 != num_blocks or block_size & (block_size - 1):
            block_size += 1
        of_blocks = [block * block_size + offset for block in mended["blocks"] for offset in range(block_size)]
        mended["slots"] = slots + of_blocks[len(slots) : num_slots]
    return mended
