"""What a client asks for, and what the router makes of it before it queues it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagedkv.adapters.tgi import generate_pb2 as pb

Tokenize = Callable[[str, bool], Sequence[int]]
"""Text and whether special tokens are added, to ids; as the server's tokenizer does."""

MAX_PIECE_TOKENS = 1024


class InvalidAskError(Exception):
    """The router itself answers 422; the server never hears of it."""


@dataclass(frozen=True)
class RouterFlags:
    """The router's command line, with its defaults."""

    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_batch_prefill_tokens: int = 4096
    max_batch_total_tokens: int | None = None
    max_batch_size: int | None = None
    waiting_served_ratio: float = 1.2
    max_waiting_tokens: int = 20
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_piece_tokens: int = MAX_PIECE_TOKENS
    """No flag of the real router, whose number is fixed; a test with few tokens has pieces too."""


@dataclass(frozen=True)
class Ask:
    """A body of /generate, with the OpenAI `model`; None is what the client left out."""

    inputs: str
    max_new_tokens: int | None = None
    model: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    do_sample: bool = False
    seed: int | None = None
    stop: tuple[str, ...] = ()
    truncate: int | None = None
    watermark: bool = False
    decoder_input_details: bool = False
    top_n_tokens: int | None = None
    regex: str | None = None
    add_special_tokens: bool = True

    def body(self) -> dict[str, Any]:
        """What a recording shows of it."""
        body: dict[str, Any] = {"inputs": self.inputs, "parameters": {"seed": self.seed}}
        return body if self.model is None else {**body, "model": self.model}


@dataclass(frozen=True)
class ValidRequest:
    message: pb.Request
    """Without what the queue adds: id, blocks, slots, cache_len, chunk_len."""
    prompt_ids: tuple[int, ...]
    """After truncation, which keeps the end."""
    max_total_new_tokens: int
    """Of the whole answer; the message asks for a piece of it."""


def validate(ask: Ask, seed: int, tokenize: Tokenize, flags: RouterFlags, lengths: tuple[int, int]) -> ValidRequest:
    """Checks a client's request as the router does.

    Args:
        seed: used where the client gave none.
        lengths: max_input_tokens and max_total_tokens, as Warmup answered.

    Raises:
        InvalidAskError: the router would answer 422.
    """
    max_input_tokens, max_total_tokens = lengths
    _check_parameters(ask, flags, max_input_tokens)
    prompt_ids = tuple(tokenize(ask.inputs, ask.add_special_tokens))
    prompt_ids = prompt_ids[-min(ask.truncate or len(prompt_ids), len(prompt_ids)) :]
    rest = max(0, max_total_tokens - len(prompt_ids))
    max_total_new_tokens = rest if ask.max_new_tokens is None else ask.max_new_tokens
    max_new_tokens = min(max_total_new_tokens, flags.max_piece_tokens)
    _require(len(prompt_ids) + max_new_tokens <= max_total_tokens, "inputs and max_new_tokens are too many")
    _require(len(prompt_ids) <= max_input_tokens, "inputs are too many")
    message = pb.Request(
        inputs=ask.inputs,
        input_chunks=pb.Input(chunks=[pb.InputChunk(text=ask.inputs)]),
        truncate=ask.truncate or max_input_tokens,
        add_special_tokens=ask.add_special_tokens,
        prefill_logprobs=ask.decoder_input_details,
        top_n_tokens=ask.top_n_tokens or 0,
        parameters=_to_parameters(ask, seed),
        # The client's ignore_eos_token does not get through.
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=max_new_tokens, stop_sequences=ask.stop),
    )
    if ask.model not in (None, "tgi"):
        message.adapter_id = ask.model
    return ValidRequest(message, prompt_ids, max_total_new_tokens)


def _require(is_valid: bool, text: str) -> None:
    if not is_valid:
        raise InvalidAskError(text)


def _check_parameters(ask: Ask, flags: RouterFlags, max_input_tokens: int) -> None:
    _require(ask.temperature is None or ask.temperature > 0, "temperature")
    _require(ask.repetition_penalty is None or ask.repetition_penalty > 0, "repetition_penalty")
    _require(-2 <= (ask.frequency_penalty or 0) <= 2, "frequency_penalty")
    _require(ask.top_p is None or 0 < ask.top_p < 1, "top_p")
    _require(ask.typical_p is None or 0 < ask.typical_p < 1, "typical_p")
    _require(ask.top_k is None or ask.top_k > 0, "top_k")
    _require(ask.max_new_tokens is None or ask.max_new_tokens > 0, "max_new_tokens")
    _require(len(ask.stop) <= flags.max_stop_sequences, "stop")
    _require((ask.top_n_tokens or 0) <= flags.max_top_n_tokens, "top_n_tokens")
    _require(ask.inputs != "", "inputs are empty")
    _require(ask.truncate is None or 0 < ask.truncate <= max_input_tokens, "truncate")


def _to_float32(value: float) -> float:
    """Numbers beyond the range of 32 bits are inf."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return float("inf")


def _to_parameters(ask: Ask, seed: int) -> pb.NextTokenChooserParameters:
    return pb.NextTokenChooserParameters(
        temperature=_to_float32(1.0 if ask.temperature is None else ask.temperature),
        top_k=ask.top_k or 0,
        top_p=1.0 if ask.top_p is None else ask.top_p,
        typical_p=1.0 if ask.typical_p is None else ask.typical_p,
        do_sample=ask.do_sample,
        seed=seed if ask.seed is None else ask.seed,
        repetition_penalty=_to_float32(1.0 if ask.repetition_penalty is None else ask.repetition_penalty),
        frequency_penalty=ask.frequency_penalty or 0.0,
        watermark=ask.watermark,
        grammar=ask.regex or "",
        grammar_type=pb.GRAMMAR_TYPE_NONE if ask.regex is None else pb.GRAMMAR_TYPE_REGEX,
    )
