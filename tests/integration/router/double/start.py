"""What a router does before its first batch, and what makes it end instead."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.adapters.tgi import generate_pb2 as pb

from .shards import Shards
from .validation import RouterFlags

_TEXT = "_test "
_IMAGE = b"stands for 736 characters of a picture"


class RouterEndsError(Exception):
    """What the server told contradicts itself or the flags: the router's process ends."""


@dataclass(frozen=True)
class Told:
    """What the server told."""

    info: pb.InfoResponse
    max_input_tokens: int
    max_total_tokens: int
    max_batch_total_tokens: int


async def connect(shards: Shards, flags: RouterFlags) -> Told:
    """Discovery, ClearCache, Info, Warmup. Raises RouterEndsError."""
    await shards.discover()
    await shards.clear_cache(None)
    info = await shards.info()
    supported, max_input_tokens, max_total_tokens = await shards.warm_up(_warm_up_request(flags))
    _require(flags.max_input_tokens in (None, max_input_tokens), "max_input_tokens is not repeated")
    _require(flags.max_total_tokens in (None, max_total_tokens), "max_total_tokens is not repeated")
    if supported is None:
        floor = max(16000, max_total_tokens, flags.max_batch_prefill_tokens)
        supported = flags.max_batch_total_tokens or floor
    _require(max_input_tokens < max_total_tokens, "max_input_tokens must be < max_total_tokens")
    fits_a_step = max_input_tokens <= flags.max_batch_prefill_tokens
    _require(info.support_chunking or fits_a_step, "max_batch_prefill_tokens must be >= max_input_tokens")
    _require(flags.max_batch_prefill_tokens <= supported, "max_batch_prefill_tokens must be <= max_batch_total_tokens")
    _require(max_total_tokens <= supported, "max_total_tokens must be <= max_batch_total_tokens")
    return Told(info, max_input_tokens, max_total_tokens, supported)


def _require(is_kept: bool, text: str) -> None:
    if not is_kept:
        raise RouterEndsError(text)


def _warm_up_request(flags: RouterFlags) -> pb.WarmupRequest:
    batch = pb.Batch(max_tokens=flags.max_input_tokens or 0)
    num_left = flags.max_batch_prefill_tokens
    while num_left > 0 and len(batch.requests) != flags.max_batch_size:
        truncate = min(num_left, flags.max_input_tokens or num_left)
        num_left -= truncate
        max_new_tokens = 1 if flags.max_total_tokens is None else flags.max_total_tokens - truncate
        text = _TEXT * truncate
        chunks = [pb.InputChunk(text=text)]
        if not batch.requests:
            chunks.append(pb.InputChunk(image=pb.Image(data=_IMAGE, mimetype="image/jpeg;base64")))
        batch.requests.append(_warm_up_item(text, chunks, truncate, max_new_tokens))
    batch.size = len(batch.requests)
    return pb.WarmupRequest(
        batch=batch,
        max_input_tokens=flags.max_input_tokens,
        max_prefill_tokens=flags.max_batch_prefill_tokens,
        max_total_tokens=flags.max_total_tokens,
    )


def _warm_up_item(text: str, chunks: list[pb.InputChunk], truncate: int, max_new_tokens: int) -> pb.Request:
    is_first = len(chunks) > 1
    return pb.Request(
        inputs=f"{text}![](data:image/jpeg;base64,…)" if is_first else text,
        input_chunks=pb.Input(chunks=chunks),
        add_special_tokens=True,
        truncate=truncate,
        parameters=pb.NextTokenChooserParameters(
            temperature=0.9,
            top_k=10,
            top_p=0.9,
            typical_p=0.9,
            repetition_penalty=1.2,
            frequency_penalty=0.1,
            watermark=True,
        ),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=max_new_tokens, ignore_eos_token=True),
        prefill_logprobs=True,
        top_n_tokens=20,
    )
