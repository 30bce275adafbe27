"""The double says what the real router said: given the same requests and the same answers, the same calls, to the last
block and slot."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from .double.router import Router
from .double.shards import CallError, Shards
from .double.start import Told
from .double.streams import Stream
from .double.validation import Ask, RouterFlags, Tokenize
from .recordings.calls import Recording
from .recordings.loop_calls import LoopCall, join_shards
from .recordings.rules import Tally
from .recordings.start_rules import check_start

TRACES = Path(__file__).with_name("recordings") / "traces"


class RecordedShards(Shards):
    """Answers as recorded, if it is asked the same."""

    def __init__(self, calls: list[LoopCall]) -> None:
        self.calls = []
        self.left = deque(calls)

    async def _call_all(self, method: str, request: Any) -> list[Any]:
        call = self.left.popleft()
        assert (method, request) == (call.method, call.request)
        if call.error is not None:
            raise CallError(call.error)
        return call.answers


def _to_ask(request: Any) -> Ask:
    """What a client must have asked for."""
    parameters, stopping = request.parameters, request.stopping_parameters
    return Ask(
        request.inputs,
        stopping.max_new_tokens,
        model=request.adapter_id if request.HasField("adapter_id") else None,
        temperature=parameters.temperature,
        top_k=parameters.top_k or None,
        top_p=parameters.top_p if parameters.top_p < 1 else None,
        typical_p=parameters.typical_p if parameters.typical_p < 1 else None,
        repetition_penalty=parameters.repetition_penalty,
        frequency_penalty=parameters.frequency_penalty,
        do_sample=parameters.do_sample,
        seed=parameters.seed,
        stop=tuple(stopping.stop_sequences),
        truncate=request.truncate,
        watermark=parameters.watermark,
        decoder_input_details=request.prefill_logprobs,
        top_n_tokens=request.top_n_tokens,
        regex=parameters.grammar or None,
        add_special_tokens=request.add_special_tokens,
    )


class _Replay:
    """Submits each request before the call in which it was recorded; takes clients away where the router noticed."""

    def __init__(self, recording: Recording, tokenize: Tokenize) -> None:
        tally = Tally()
        told = check_start(recording, tally)
        assert told is not None
        self._shards = RecordedShards(join_shards(recording, tally, told.end_ms))
        flags = recording.flags
        self.router = Router(
            self._shards,
            tokenize,
            RouterFlags(
                flags.get("--max-input-tokens"),
                flags.get("--max-total-tokens"),
                flags["--max-batch-prefill-tokens"],
                max_piece_tokens=recording.max_piece_tokens,
            ),
        )
        self.router.begin(Told(told.info, told.max_input_tokens, told.max_total_tokens, told.max_batch_total_tokens))
        self._streams: dict[int, Stream] = {}

    async def run(self) -> None:
        while self._shards.left:
            self._prepare()
            assert await self.router.turn()

    def _prepare(self) -> None:
        call = self._shards.left[0]
        if call.method == "Prefill":
            for request in call.request.batch.requests:
                # Ids of those who left the queue are not told.
                while self.router.next_id < request.id:
                    self.router.submit(Ask("left", 1)).leave()
                if request.id == self.router.next_id:
                    stream = self.router.submit(_to_ask(request))
                    # Like Decodes are left out of a recording, so that tokens can't be counted; a next piece is asked
                    # for as a request of its own.
                    stream.max_total_new_tokens = 0
                    self._streams[request.id] = stream
        if call.error is None and len(self._shards.left) > 1:
            behind = self._shards.left[1]
            if behind.method == "FilterBatch":
                self._leave(set(call.batch.request_ids) - set(behind.request.request_ids))
            if behind.method == "ClearCache":
                self._leave(set(call.batch.request_ids))

    def _leave(self, request_ids: set[int]) -> None:
        for request_id in request_ids:
            self._streams[request_id].leave()


@pytest.fixture
def tokenizers(demo_model: Path, tiny_tokenizer: Tokenizer) -> Callable[[str], Tokenize]:
    """By the name of a recording."""
    demo = Tokenizer.from_file(str(demo_model / "tokenizer.json"))

    def choose(name: str) -> Tokenize:
        tokenizer = tiny_tokenizer if name in ("chunks", "probes") else demo
        return lambda text, add_special_tokens: tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    return choose


@pytest.mark.parametrize(
    "name", ["start", "prefix", "joined", "gone", "chunked", "chunks", "full", "refused", "drain", "shards", "probes"]
)
def test_the_double_makes_the_recorded_calls(tokenizers: Callable[[str], Tokenize], name: str) -> None:
    replay = _Replay(Recording.read(TRACES / f"{name}.jsonl"), tokenizers(name))
    asyncio.run(replay.run())
