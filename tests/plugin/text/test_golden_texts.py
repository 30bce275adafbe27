"""The recorded ids of a real text-generation-inference server give the recorded texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pagedkv.plugin.interface import Tokenizer
from pagedkv.plugin.text import OutputText

TRACES = sorted((Path(__file__).parents[2] / "golden").glob("*.json"))

RIGHT_FINAL_TEXTS = {
    ("10b_prefill_logprobs_batch", "2"): " 😇 ",
    ("18e_ends_mid_char", "0"): " 😇 😊 ",
    ("18e_ends_mid_char", "1"): "香",
    ("18e_ends_mid_char", "2"): "",
}
"""Where the recording server gave nothing because the output ends inside a character."""

BADLY_STREAMED = "18h_short_prompt_multibyte"
"""Short prompts, streamed wrongly by the recording server alone, rightly beside a longer one."""
RIGHTLY_STREAMED = "18i_short_prompt_multibyte_batch"


@dataclass
class Replay:
    """One request of a trace: what was recorded, and our text of the same ids."""

    prompt: str
    output: OutputText
    recorded: list[str]
    streamed: list[str]
    has_stopped: list[bool]
    final: dict[str, Any] | None = None


def load(path: Path) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return trace


def prompt_of(request: dict[str, Any]) -> str:
    chunks = request.get("input_chunks", {}).get("chunks", [])
    return "".join(chunk.get("text", "") for chunk in chunks) or request.get("inputs", "")


def new_replay(tokenizer: Tokenizer, request: dict[str, Any]) -> Replay:
    prompt = prompt_of(request)
    ids = tokenizer.encode(prompt, request.get("add_special_tokens", False))[-request.get("truncate", 0) :]
    stop = request.get("stopping_parameters", {}).get("stop_sequences", [])
    return Replay(prompt, OutputText(tokenizer, ids, stop), [], [], [])


def replay(tokenizer: Tokenizer, trace: dict[str, Any]) -> Iterator[tuple[str, Replay]]:
    """Runs every request of a trace through OutputText; yields it with its id when the trace has no more of it."""
    live: dict[str, Replay] = {}
    for call in trace["calls"]:
        if call["method"] == "Prefill":
            for request in call["request"].get("batch", {}).get("requests", []):
                request_id = request.get("id", "0")
                if request_id in live:
                    yield request_id, live[request_id]
                live[request_id] = new_replay(tokenizer, request)
        for generation in call.get("response", {}).get("generations", []):
            one = live[generation.get("request_id", "0")]
            if one.final is not None:
                continue  # the recording server let a finished row generate on; we don't
            tokens = generation["tokens"]
            one.recorded += tokens["texts"]
            for token_id in tokens["ids"]:
                one.streamed.append(one.output.push(token_id))
                one.has_stopped.append(one.output.has_stopped)
            one.final = generation.get("generated_text")
    yield from live.items()


@pytest.mark.parametrize("path", [path for path in TRACES if path.stem != BADLY_STREAMED], ids=lambda path: path.stem)
def test_ids_stream_as_recorded(path: Path, demo_tokenizer: Tokenizer) -> None:
    for _, one in replay(demo_tokenizer, load(path)):
        assert one.streamed == one.recorded


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_final_text_as_recorded(path: Path, demo_tokenizer: Tokenizer) -> None:
    trace = load(path)
    for request_id, one in replay(demo_tokenizer, trace):
        if one.final is not None:
            recorded = RIGHT_FINAL_TEXTS.get((trace["name"], request_id), one.final.get("text", ""))
            assert one.output.final_text() == recorded


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_stops_where_recorded(path: Path, demo_tokenizer: Tokenizer) -> None:
    """Before its last token no request has stopped; at its end one has whose reason is the stop string."""
    for _, one in replay(demo_tokenizer, load(path)):
        if one.final is None:
            assert not any(one.has_stopped)
        else:
            assert not any(one.has_stopped[:-1])
            if one.final.get("finish_reason") == "FINISH_REASON_STOP_SEQUENCE":
                assert one.has_stopped[-1]


def test_limit_and_stop_string_in_one_step_both_hold(demo_tokenizer: Tokenizer, golden: Path) -> None:
    """LENGTH is reported there, but the stop string did match."""
    [(_, one)] = replay(demo_tokenizer, load(golden / "06e_stop_with_length_same_step.json"))
    assert one.final is not None
    assert "finish_reason" not in one.final
    assert one.has_stopped[-1]


def test_short_prompts_stream_as_beside_a_longer_one(demo_tokenizer: Tokenizer, golden: Path) -> None:
    right = {one.prompt: one for _, one in replay(demo_tokenizer, load(golden / f"{RIGHTLY_STREAMED}.json"))}
    ours = {one.prompt: one for _, one in replay(demo_tokenizer, load(golden / f"{BADLY_STREAMED}.json"))}
    compared = right.keys() & ours.keys()
    assert len(compared) == 6
    for prompt in compared:
        assert ours[prompt].streamed == right[prompt].recorded
    for prompt in ours.keys() - compared:
        assert ours[prompt].streamed == ours[prompt].recorded


def test_traces_are_there() -> None:
    """The parametrized tests above would pass without a single trace."""
    assert len(TRACES) == 80
    assert sum(len(load(path)["calls"]) for path in TRACES) == 675
