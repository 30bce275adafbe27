"""Converts protobuf messages to the requests of a backend, and its tokens to messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.batches import BatchState
from pagedkv.adapters.tgi.prompts import PromptEncoder, TokenTexts
from pagedkv.plugin.errors import RequestError
from pagedkv.plugin.interface import BackendInfo, Capacity, WarmupLimits
from pagedkv.plugin.requests import (
    CacheNamespace,
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    StepOutput,
    TokenLogprob,
)

SHARED_NAMESPACE = CacheNamespace()
"""Namespace of requests without a cache salt."""

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


def to_requests(batch: pb.Batch, encoder: PromptEncoder, namespace: CacheNamespace = SHARED_NAMESPACE) -> list[Request]:
    """Converts the requests of a new batch, all in one namespace of the cache.

    Raises:
        RequestError: the batch is empty, or a request is invalid; the message names it.
    """
    if not batch.requests:
        raise RequestError("the batch has no requests; send at least one")
    checked = [(message, _to_params(message)) for message in batch.requests]
    return [_to_request(message, params, encoder, namespace) for message, params in checked]


def _to_request(
    message: pb.Request, params: SamplingParams, encoder: PromptEncoder, namespace: CacheNamespace
) -> Request:
    request_id = RequestId(message.id)
    prompt_ids = encoder.encode(request_id, _prompt_text(message), message.truncate, message.add_special_tokens)
    return Request(request_id, prompt_ids, params, namespace)


def _prompt_text(message: pb.Request) -> str:
    if not message.HasField("input_chunks"):
        text = message.inputs
    else:
        text = "".join(chunk.text for chunk in message.input_chunks.chunks)
    if not text:
        raise RequestError(f"request {message.id}: the prompt has no text; send a text chunk or inputs")
    return text


def _to_params(message: pb.Request) -> SamplingParams:
    """Converts sampling parameters. Raises RequestError, naming the request, if one is unsupported or out of range."""
    chooser, stopping = message.parameters, message.stopping_parameters
    if chooser.grammar or chooser.grammar_type != pb.GRAMMAR_TYPE_NONE:
        raise RequestError(f"request {message.id}: grammars are not supported yet; leave grammar and its type out")
    if message.adapter_id:
        raise RequestError(f"request {message.id}: there is no adapter {message.adapter_id!r}; none is loaded here")
    try:
        return SamplingParams(
            max_new_tokens=stopping.max_new_tokens,
            ignore_eos=stopping.ignore_eos_token,
            stop=tuple(stopping.stop_sequences),
            do_sample=chooser.do_sample,
            temperature=chooser.temperature,
            top_k=chooser.top_k,
            top_p=chooser.top_p,
            typical_p=chooser.typical_p,
            seed=chooser.seed,
            repetition_penalty=chooser.repetition_penalty or 1.0,
            relative_frequency_penalty=chooser.frequency_penalty,
            watermark=chooser.watermark,
            top_n_tokens=message.top_n_tokens,
            prefill_logprobs=message.prefill_logprobs,
        )
    except RequestError as error:
        raise RequestError(f"request {message.id}: {error}") from None


def to_generation(token: NewToken, texts: TokenTexts) -> pb.Generation:
    """Returns the message for one new token."""
    output = token.output
    token_id = output.token.token_id
    generation = pb.Generation(request_id=output.request_id)
    tokens = generation.tokens  # Appending in place takes half the time of constructing from lists.
    tokens.ids.append(token_id)
    tokens.logprobs.append(output.token.logprob)
    tokens.texts.append(token.text)
    tokens.is_special.append(token_id in texts.special_ids)
    if output.prefill_logprobs is not None:
        prompt_ids = token.request.prompt_ids
        generation.prefill_tokens.ids.extend(prompt_ids)
        generation.prefill_tokens.logprobs.extend(output.prefill_logprobs)
        generation.prefill_tokens.texts.extend(map(texts.text_of, prompt_ids))
    if output.top_tokens:
        generation.top_tokens.append(_to_top_tokens(output.top_tokens, texts))
    if token.final is not None:
        generation.generated_text.CopyFrom(_to_generated_text(token.final, output.seed))
    return generation


def _to_top_tokens(tokens: Sequence[TokenLogprob], texts: TokenTexts) -> pb.Tokens:
    ids = [token.token_id for token in tokens]
    return pb.Tokens(
        ids=ids,
        logprobs=[token.logprob for token in tokens],
        texts=map(texts.text_of, ids),
        is_special=[token_id in texts.special_ids for token_id in ids],
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
        max_tokens=min(state.max_tokens, 2**32 - 1),
        current_tokens=min(state.current_tokens, 2**32 - 1),
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
        max_supported_total_tokens=None if info.requires_padding else min(supported_tokens, 2**32 - 1),
        max_input_tokens=capacity.max_input_tokens,
        max_total_tokens=capacity.max_total_tokens,
    )
