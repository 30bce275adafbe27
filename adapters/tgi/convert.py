"""Converts what a backend tells, and its tokens, to protobuf messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.batches import BatchState
from pagedkv.plugin.interface import BackendInfo, Capacity, WarmupLimits
from pagedkv.plugin.requests import FinishReason, Request, RequestId, StepOutput, TokenLogprob

_MAX_UINT32 = 2**32 - 1

FINISH_REASONS = {
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.EOS_TOKEN: pb.FINISH_REASON_EOS_TOKEN,
    FinishReason.STOP_SEQUENCE: pb.FINISH_REASON_STOP_SEQUENCE,
}


@dataclass(frozen=True, slots=True)
class FinalText:
    """The end of a request: its whole text and finish reason."""

    text: str
    num_generated_tokens: int
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class NewToken:
    """One new token of one request, with its text."""

    request: Request
    output: StepOutput
    text: str
    """The text to stream with this token."""
    is_first: bool
    """Whether it is the request's first token."""
    final: FinalText | None
    """Set in the request's last token only."""
    prompt_texts: Sequence[str] = ()
    """Of the prompt's tokens, each decoded alone, where the output has their log-probabilities."""
    top_texts: Sequence[str] = ()
    """Of the output's top tokens, each decoded alone."""

    @property
    def request_id(self) -> RequestId:
        return self.request.id


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """The end of a request that the model gave no token: it was refused, or it failed on its way."""

    request_id: RequestId
    reason: str
    """A refusal's value, or "failed"."""
    message: str
    """What a client may be told."""
    text: str = ""
    """What was generated before."""
    num_generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EndMarks:
    """How early ends are written."""

    token_id: int
    """The model's end-of-text token: a generation without a token makes a router panic."""
    tells_reason: bool
    """Whether the text ends with the message."""


def to_generation(token: NewToken, special_ids: Collection[int]) -> pb.Generation:
    """Returns the message for one new token."""
    output = token.output
    token_id = output.token.token_id
    generation = pb.Generation(request_id=output.request_id)
    tokens = generation.tokens  # Appending in place costs half of what constructing from lists does, at every token.
    tokens.ids.append(token_id)
    tokens.logprobs.append(output.token.logprob)
    tokens.texts.append(token.text)
    tokens.is_special.append(token_id in special_ids)
    if output.prefill_logprobs is not None:
        generation.prefill_tokens.ids.extend(token.request.prompt_ids)
        generation.prefill_tokens.logprobs.extend(output.prefill_logprobs)
        generation.prefill_tokens.texts.extend(token.prompt_texts)
    if output.top_tokens:
        generation.top_tokens.append(_to_top_tokens(output.top_tokens, token.top_texts, special_ids))
    if token.final is not None:
        generation.generated_text.CopyFrom(_to_generated_text(token.final, output.seed))
    return generation


def to_early_end(end: EarlyEnd, marks: EndMarks) -> pb.Generation:
    """Returns the message that closes a request that got no further token: one end-of-text token, and the message.

    A router divides times by the number of generated tokens, so that it is never 0.
    """
    told = ("\n\n" if end.text else "") + end.message if marks.tells_reason else ""
    final = FinalText(end.text + told, end.num_generated_tokens + 1, FinishReason.EOS_TOKEN)
    return pb.Generation(
        request_id=end.request_id,
        # Chat streams leave the text of special tokens out.
        tokens=pb.Tokens(ids=[marks.token_id], logprobs=[0.0], texts=[told], is_special=[not told]),
        generated_text=_to_generated_text(final, None),
    )


def _to_top_tokens(tokens: Sequence[TokenLogprob], texts: Sequence[str], special_ids: Collection[int]) -> pb.Tokens:
    ids = [token.token_id for token in tokens]
    return pb.Tokens(
        ids=ids,
        logprobs=[token.logprob for token in tokens],
        texts=texts,
        is_special=[token_id in special_ids for token_id in ids],
    )


def _to_generated_text(final: FinalText, seed: int | None) -> pb.GeneratedText:
    return pb.GeneratedText(
        text=final.text,
        generated_tokens=final.num_generated_tokens,
        finish_reason=FINISH_REASONS[final.finish_reason],
        seed=seed,
    )


def to_cached_batch(state: BatchState) -> pb.CachedBatch:
    """Returns the message for a batch that continues. Counts beyond 32 bits are clamped to the largest that fits."""
    return pb.CachedBatch(
        id=state.id,
        request_ids=state.request_ids,
        size=len(state.request_ids),
        max_tokens=min(state.max_tokens, _MAX_UINT32),
        current_tokens=min(state.current_tokens, _MAX_UINT32),
    )


def to_info(info: BackendInfo, has_chunked_prefill: bool) -> pb.InfoResponse:
    """Returns the message about the model server. `has_chunked_prefill`: whether to report the backend's support."""
    return pb.InfoResponse(
        requires_padding=info.requires_padding,
        dtype=str(info.dtype),
        device_type=info.device.type,
        # No window_size, though a model may have one: a router would count no token beyond it, and all are kept here.
        speculate=0,
        support_chunking=info.can_chunk_prefill and has_chunked_prefill,
        use_prefix_caching=info.has_prefix_cache,
        attention_impl=info.attention_kernels,
        block_size=info.block_size,
    )


def to_limits(request: pb.WarmupRequest, may_chunk_prefill: bool) -> WarmupLimits:
    """`may_chunk_prefill`: as Info told. A router that was told otherwise ends at start unless one step's budget, its
    max_prefill_tokens, holds the longest prompt."""
    return WarmupLimits(
        max_input_tokens=request.max_input_tokens,
        max_total_tokens=request.max_total_tokens,
        max_prefill_tokens=request.max_prefill_tokens,
        may_chunk_prefill=may_chunk_prefill,
    )


def to_warmup_response(request: pb.WarmupRequest, capacity: Capacity, info: BackendInfo) -> pb.WarmupResponse:
    """Returns the response to a warm-up: what the router may hand out.

    A router keeps its block 0 back for probes and never gives it to a request. So one block more is told than there is:
    a request of max_total_tokens then runs in a cache of exactly that size. A router also ends at start when it is told
    less than its own max_prefill_tokens; requests beyond the cache wait in the backend.
    """
    supported_tokens = max(capacity.max_cache_tokens + info.block_size, request.max_prefill_tokens)
    return pb.WarmupResponse(
        max_supported_total_tokens=None if info.requires_padding else min(supported_tokens, _MAX_UINT32),
        max_input_tokens=capacity.max_input_tokens,
        max_total_tokens=capacity.max_total_tokens,
    )
