"""Every kind of request that a client can send and that the router lets through, and some that it refuses itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

MAX_INPUT_TOKENS = 1500
"""The launcher's flag where these requests are sent."""
MAX_TOTAL_TOKENS = 2048

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"  # a PNG of 1 x 1


class Ending(Enum):
    ANSWERED = "answered"
    """The server did what was asked."""
    REFUSED_BY_SERVER = "refused by the server"
    """The answer ended at its first token, and no one else's did."""
    REFUSED_BY_ROUTER = "refused by the router"
    """No call reached the server."""


@dataclass(frozen=True, slots=True)
class RequestKind:
    name: str
    path: str
    body: Mapping[str, Any]
    ending: Ending = Ending.ANSWERED
    same_as: Mapping[str, Any] | None = None
    """Parameters of `/generate` that give the same answer, where that is known."""
    is_large: bool = field(default=False, kw_only=True)
    """It takes so long that streams beside it need more tokens."""

    def __str__(self) -> str:
        return self.name


def _generate(
    name: str, ending: Ending = Ending.ANSWERED, same_as: Mapping[str, Any] | None = None, **parameters: Any
) -> RequestKind:
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 4, "details": True, **parameters}}
    return RequestKind(name, "/generate", body, ending, same_as)


def _prompt(name: str, inputs: str, ending: Ending = Ending.ANSWERED, **parameters: Any) -> RequestKind:
    body = {"inputs": inputs, "parameters": {"max_new_tokens": 4, "details": True, **parameters}}
    return RequestKind(name, "/generate", body, ending, is_large=len(inputs) > 100_000)


def _chat(name: str, ending: Ending = Ending.ANSWERED, **body: Any) -> RequestKind:
    messages = [{"role": "user", "content": "Say hello."}]
    return RequestKind(name, "/v1/chat/completions", {"messages": messages, "max_tokens": 6, **body}, ending)


_REFUSED = Ending.REFUSED_BY_SERVER
_BY_ROUTER = Ending.REFUSED_BY_ROUTER
_GREEDY: Mapping[str, Any] = {}

GENERATE = (
    _generate("plain", same_as=_GREEDY),
    _generate("temperature that becomes inf", temperature=1e39, do_sample=True),
    _generate("temperature that becomes 0 or almost", temperature=1e-39, do_sample=True),
    _generate("repetition_penalty that becomes inf", repetition_penalty=1e39),
    _generate("repetition_penalty almost 0", repetition_penalty=1e-30),
    _generate("frequency_penalty at its lowest", frequency_penalty=-2.0),
    _generate("frequency_penalty at its highest", frequency_penalty=2.0),
    _generate("top_k of 2^31 - 1", top_k=2**31 - 1, do_sample=True),
    _generate("top_p almost 0", top_p=1e-30, do_sample=True),
    _generate("typical_p almost 1", typical_p=0.9999, do_sample=True),
    _generate("seed of 2^64 - 1", seed=2**64 - 1, do_sample=True),
    _generate("an empty stop string", stop=["a", "b", "c", ""]),
    _generate("truncate to 1", truncate=1),
    _generate("truncate to the limit", same_as=_GREEDY, truncate=MAX_INPUT_TOKENS),
    _generate("top_n_tokens of 5", same_as=_GREEDY, top_n_tokens=5),
    _generate("watermark", watermark=True, do_sample=True),
    _generate("return_full_text", return_full_text=True),
    _generate("best_of 2", best_of=2, do_sample=True),
    _generate("decoder_input_details", same_as=_GREEDY, decoder_input_details=True),
    _generate("one token", max_new_tokens=1),
    _generate("an adapter that is not there", same_as=_GREEDY, adapter_id="nobody/nothing"),
    _generate("grammar: regex", _REFUSED, grammar={"type": "regex", "value": "[0-9]{3}"}),
    _generate("grammar: a regex that is none", _REFUSED, grammar={"type": "regex", "value": "[0-9"}),
    _generate("grammar: JSON", _REFUSED, grammar={"type": "json", "value": SCHEMA}),
    _generate(
        "grammar: JSON schema", _REFUSED, grammar={"type": "json_schema", "value": {"name": "person", "schema": SCHEMA}}
    ),
    _generate("grammar: JSON without properties", _BY_ROUTER, grammar={"type": "json", "value": {"type": "object"}}),
    _generate("max_new_tokens of 0", _BY_ROUTER, max_new_tokens=0),
    _generate("temperature of 0", _BY_ROUTER, temperature=0.0),
    _generate("top_k of 0", _BY_ROUTER, top_k=0),
    _generate("truncate over the limit", _BY_ROUTER, truncate=MAX_INPUT_TOKENS + 1),
    _generate("stop strings over the limit", _BY_ROUTER, stop=list("abcde")),
    _prompt("a NUL in the prompt", "\0 nul"),
    _prompt("a space", " "),
    _prompt("special tokens in the prompt", "<|im_start|>user\n<|endoftext|><|im_end|>"),
    _prompt("half a surrogate pair and other rare characters", "\N{REPLACEMENT CHARACTER}\u200b\U0001f600\u0301"),
    _prompt("300,000 characters, truncated to 8 tokens", "x" * 300_000, truncate=8),
    _prompt("1.15 MB, truncated to 100 tokens", "word " * 230_000, truncate=100),
    _prompt("a prompt of all input tokens", "word" + " word" * (MAX_INPUT_TOKENS - 1)),
    _prompt("a prompt over the limit", "word" + " word" * MAX_INPUT_TOKENS, _BY_ROUTER),
    _prompt("more tokens than the limit", "word" + " word" * 1400, _BY_ROUTER, max_new_tokens=MAX_TOTAL_TOKENS - 1400),
    _prompt("an empty prompt", "", _BY_ROUTER),
    _prompt("an image", f"![](data:image/png;base64,{PIXEL})What is this?"),
)

OPENAI = (
    _chat("chat"),
    _chat("chat: model tgi", model="tgi"),
    _chat("chat: model as listed", model="MODEL"),
    _chat("chat: any model's name", model="gpt-4o-mini"),
    _chat("chat: tools, auto", _REFUSED, tools=[WEATHER]),
    _chat("chat: tools, required", _REFUSED, tools=[WEATHER], tool_choice="required"),
    _chat(
        "chat: tools, by name",
        _REFUSED,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    ),
    _chat("chat: tools, none", tools=[WEATHER], tool_choice="none"),
    _chat("chat: response_format JSON object", _REFUSED, response_format={"type": "json_object", "value": SCHEMA}),
    _chat(
        "chat: response_format JSON schema",
        _REFUSED,
        response_format={"type": "json_schema", "value": {"name": "person", "schema": SCHEMA}},
    ),
    _chat("chat: response_format regex", _REFUSED, response_format={"type": "regex", "value": "[0-9]{3}"}),
    _chat("chat: logprobs", logprobs=True, top_logprobs=5),
    _chat("chat: temperature 0", temperature=0.0),
    _chat(
        "chat: many parameters",
        seed=7,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        stop=["\n"],
        model="MODEL",
    ),
    _chat("chat: stream", stream=True, stream_options={"include_usage": True}),
    _chat("chat: stream with tools", _REFUSED, stream=True, tools=[WEATHER], tool_choice="required"),
    RequestKind(
        "completions: two prompts", "/v1/completions", {"model": "MODEL", "prompt": ["one", "two"], "max_tokens": 4}
    ),
)

KINDS = GENERATE + OPENAI
