"""What each request may hold."""

from __future__ import annotations

from typing import Any

from pagedkv.adapters.tgi import generate_pb2 as pb

from .calls import Recording
from .loop_calls import LoopCall
from .rules import Tally
from .start_rules import Told

_CUT = "<"
"""Begins the note at the end of a text that a recording cut."""


def check_requests(recording: Recording, calls: list[LoopCall], told: Told, tally: Tally) -> None:
    """Every request of every Prefill."""
    pieces = _Pieces(recording, told, tally)
    for call in calls:
        if call.method == "Prefill":
            for request in call.request.batch.requests:
                _check_request(request, recording, told, tally, call.begin_ms)
                _check_adapter(request, recording, tally, call.begin_ms)
                pieces.take_request(request, call.begin_ms)
        if call.method in ("Prefill", "Decode") and call.error is None:
            for generation in call.generations:
                pieces.take_generation(generation)


def _check_request(request: Any, recording: Recording, told: Told, tally: Tally, at_ms: float) -> None:
    def check(rule: str, is_kept: bool, text: object = "") -> None:
        tally.check(rule, is_kept, at_ms, "Prefill", text)

    stopping, parameters = request.stopping_parameters, request.parameters
    check("max-new-tokens", 1 <= stopping.max_new_tokens <= recording.max_piece_tokens, stopping.max_new_tokens)
    chunks = [chunk.text for chunk in request.input_chunks.chunks if chunk.WhichOneof("chunk") == "text"]
    check("text", request.inputs == "".join(chunks) != "" and 1 <= request.truncate <= told.max_input_tokens)
    check("never-ignore-eos", not stopping.ignore_eos_token)
    check("parameters", parameters.temperature > 0 and parameters.repetition_penalty > 0, "not above 0")
    check("parameters", 0 < parameters.top_p <= 1 and 0 < parameters.typical_p <= 1, "top_p or typical_p")
    check("parameters", -2 <= parameters.frequency_penalty <= 2, "frequency_penalty")
    check("parameters", len(stopping.stop_sequences) <= recording.flags["--max-stop-sequences"], "stop strings")
    check("parameters", request.top_n_tokens <= recording.flags["--max-top-n-tokens"], "top_n_tokens")
    if parameters.grammar or parameters.grammar_type:
        check("grammar", bool(parameters.grammar) and parameters.grammar_type == pb.GRAMMAR_TYPE_REGEX)


def _check_adapter(request: Any, recording: Recording, tally: Tally, at_ms: float) -> None:
    if not request.HasField("adapter_id") or not recording.events:
        return
    names = set()
    for event in recording.events:
        if event.at_ms <= at_ms:
            names |= {event.body.get("parameters", {}).get("adapter_id"), event.body.get("model", "tgi")} - {"tgi"}
    tally.check("adapter-from-model", request.adapter_id in names, at_ms, "Prefill", request.adapter_id)


class _Pieces:
    """One answer that comes as several requests has one seed. Clients may give a seed twice; these are passed over."""

    def __init__(self, recording: Recording, told: Told, tally: Tally) -> None:
        self._told = told
        self._tally = tally
        self._max_piece_tokens = recording.max_piece_tokens
        self._has_events = bool(recording.events)
        self._clients_seeds = {
            seed
            for event in recording.events
            for seed in (event.body.get("seed"), event.body.get("parameters", {}).get("seed"))
        }
        self._last: dict[int, Any] = {}
        """The last request with a seed."""
        self._ended: dict[int, Any] = {}
        """How a request ended."""

    def take_request(self, request: Any, at_ms: float) -> None:
        seed = request.parameters.seed
        before = self._last.get(seed)
        if before is not None and self._has_events and seed not in self._clients_seeds:
            ended = self._ended.get(before.id)
            is_by_length = ended is not None and ended.finish_reason == pb.FINISH_REASON_LENGTH
            self._check(is_by_length, at_ms, f"{before.id} did not end by length")
            if is_by_length:
                is_same = _is_same_text(request.inputs, before.inputs, ended.text)
                self._check(is_same, at_ms, f"{request.id} is not {before.id} and what it generated")
            self._check(self._is_right_length(request, before), at_ms, "max_new_tokens")
        self._last[seed] = request

    def _is_right_length(self, request: Any, before: Any) -> bool:
        """What the client asked for, or all that is left where it asked for nothing; a piece at most."""
        asked, before_asked = (r.stopping_parameters.max_new_tokens for r in (request, before))
        num_prompt_tokens = len(request.slots) - asked - self._told.info.speculate + 1
        rest = min(self._max_piece_tokens, self._told.max_total_tokens - num_prompt_tokens)
        return before_asked == self._max_piece_tokens and asked in (before_asked, rest)

    def take_generation(self, generation: Any) -> None:
        if generation.HasField("generated_text"):
            self._ended[generation.request_id] = generation.generated_text

    def _check(self, is_kept: bool, at_ms: float, text: str) -> None:
        self._tally.check("piece-again", is_kept, at_ms, "Prefill", text)


def _is_same_text(text: str, first: str, second: str) -> bool:
    """Whether the one is the two others in a row, also of texts that a recording cut. Their lengths must fit too."""
    if _length(text) != _length(first) + _length(second):
        return False
    visible = [_visible(part) for part in (text, first, second)]
    joined = visible[1] if _length(first) > len(visible[1]) else visible[1] + visible[2]
    num_visible = min(len(visible[0]), len(joined))
    return visible[0][:num_visible] == joined[:num_visible]


def _length(text: str) -> int:
    """Of the whole text, in characters."""
    if text.endswith(" characters>"):
        return int(text[text.rindex(_CUT) + 1 :].split()[0])
    return len(text)


def _visible(text: str) -> str:
    return text[: text.rindex(_CUT)] if text.endswith(" characters>") else text
