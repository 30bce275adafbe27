"""What a router does before its first batch."""

from __future__ import annotations

from dataclasses import dataclass

from .calls import Recording
from .rules import Tally

_TEXT = "_test "


@dataclass(frozen=True)
class Told:
    """What the server told at the start."""

    info: object
    """pb.InfoResponse"""
    max_input_tokens: int
    max_total_tokens: int
    max_batch_total_tokens: int
    end_ms: float
    """When the last shard had answered Warmup."""


def check_start(recording: Recording, tally: Tally) -> Told | None:
    """Returns None where the recording ends before Warmup has been answered."""
    warmups = [call for call in recording.calls if call.method == "Warmup"]
    if not warmups or any(call.error is not None for call in warmups):
        return None
    end_ms = max(call.end_ms for call in warmups)
    num_shards = len({call.rank for call in warmups})
    begun = [call for call in recording.calls if call.begin_ms < end_ms]
    order = [(call.method, call.rank) for call in begun]
    groups = [order[0:1]] + [sorted(order[1 + i * num_shards : 1 + (i + 1) * num_shards]) for i in range(3)]
    expected = [[("ServiceDiscovery", 0)]]
    expected += [[(method, rank) for rank in range(num_shards)] for method in ("ClearCache", "Info", "Warmup")]
    tally.check("start-order", groups == expected and len(order) == 1 + 3 * num_shards, 0, "", order)
    for call in begun:
        if call.method == "ClearCache":
            tally.check("start-order", not call.request.HasField("id"), call.begin_ms, call.method)
    for i in range(2, len(begun)):
        same_method = begun[i].method == begun[i - 1].method
        tally.check("start-order", same_method or begun[i].begin_ms >= begun[i - 1].end_ms, begun[i].begin_ms, "")
    for call in warmups:
        _check_warm_up_batch(recording.flags, call.request, tally, call.begin_ms)
        _check_limits(recording.flags, call.request, call.answer, tally, call.begin_ms)
    lengths = [_lengths(call.answer) for call in warmups]
    supported, max_input, max_total = min(lengths)
    if supported < 0:
        prefill = recording.flags["--max-batch-prefill-tokens"]
        supported = recording.flags.get("--max-batch-total-tokens", max(16000, max_total, prefill))
    info = next(call.answer for call in recording.calls if call.method == "Info" and call.rank == num_shards - 1)
    return Told(info, max_input, max_total, supported, end_ms)


def _lengths(answer: object) -> tuple[int, int, int]:
    supported = answer.max_supported_total_tokens if answer.HasField("max_supported_total_tokens") else -1
    return supported, answer.max_input_tokens, answer.max_total_tokens


def _check_warm_up_batch(flags: dict[str, int], request: object, tally: Tally, at_ms: float) -> None:
    def check(is_kept: bool, text: str) -> None:
        tally.check("warm-up-batch", is_kept, at_ms, "Warmup", text)

    batch = request.batch
    check(batch.id == 0 and batch.size == len(batch.requests) >= 1, "id or size")
    check(batch.max_tokens == request.max_input_tokens and batch.max_blocks == 0, "max_tokens or max_blocks")
    num_left = request.max_prefill_tokens
    for index, item in enumerate(batch.requests):
        truncate = min(num_left, request.max_input_tokens or num_left)
        check(item.truncate == truncate, "truncate")
        num_left -= truncate
        kinds = [chunk.WhichOneof("chunk") for chunk in item.input_chunks.chunks]
        check(kinds == (["text"] if index else ["text", "image"]), "chunks")
        check(item.inputs.startswith(_TEXT), "text")
        max_new_tokens = request.max_total_tokens - truncate if request.HasField("max_total_tokens") else 1
        stopping = item.stopping_parameters
        check((stopping.max_new_tokens, stopping.ignore_eos_token) == (max_new_tokens, True), "stopping parameters")
        check(item.prefill_logprobs and item.top_n_tokens == 20 and item.parameters.watermark, "what is asked for")
        check(item.id == 0 and not item.blocks and not item.slots and not item.HasField("adapter_id"), "id or blocks")
    is_full = len(batch.requests) == flags.get("--max-batch-size")
    check(num_left == 0 or is_full, "the requests do not fill max_prefill_tokens")


def _check_limits(flags: dict[str, int], request: object, answer: object, tally: Tally, at_ms: float) -> None:
    prefill = flags["--max-batch-prefill-tokens"]
    tally.check("warm-up-limits", request.max_prefill_tokens == prefill, at_ms, "Warmup", "max_prefill_tokens")
    for name in ("max_input_tokens", "max_total_tokens"):
        asked = getattr(request, name) if request.HasField(name) else None
        tally.check("warm-up-limits", asked == flags.get("--" + name.replace("_", "-")), at_ms, "Warmup", name)
        if asked is not None:
            tally.check("warm-up-limits", getattr(answer, name) == asked, at_ms, "Warmup", f"answered {name}")
