"""Reads the requests of a new batch. Each is judged alone: one that can't be served is refused, the others are not."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping
from dataclasses import replace

from pagedkv.adapters.rpc.refusals import find_refusal
from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.batches import LiveRequest
from pagedkv.adapters.tgi.convert import EarlyEnd
from pagedkv.adapters.tgi.prompts import PromptEncoder
from pagedkv.adapters.tgi.status import describe_error
from pagedkv.plugin.errors import RequestError, UnsupportedRequestError
from pagedkv.plugin.interface import Capacity, Tokenizer
from pagedkv.plugin.observer import Refusal
from pagedkv.plugin.requests import MAX_NEW_TOKENS, CacheNamespace, Request, RequestId, SamplingParams
from pagedkv.plugin.text import OutputText

logger = logging.getLogger(__name__)

SHARED_NAMESPACE = CacheNamespace()
"""Namespace of requests without a cache salt."""

_MIN_SCALE, _MAX_SCALE = 1e-30, 1e30
"""Of temperature and repetition penalty: a score times or divided by it is still a finite number of 32 bits. A number
that a client's JSON has beyond 32 bits arrives as infinity, and means "as much as possible"."""
_MAX_FREQUENCY_PENALTY = 2.0
_PRIVATE_SALT_BYTES = 16


class RequestReader:
    """Converts the messages of a batch to requests with their text.

    Args:
        tokenizer: of the model.
        encoder: tokenizes prompts.
        has_prompts_in_log: whether ended requests are logged with their prompt.
    """

    def __init__(self, tokenizer: Tokenizer, encoder: PromptEncoder, has_prompts_in_log: bool = False) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._has_prompts_in_log = has_prompts_in_log

    def read(
        self,
        batch: pb.Batch,
        namespace: CacheNamespace | None,
        trace_context: Mapping[str, str],
        arrived_s: float,
    ) -> list[LiveRequest | EarlyEnd]:
        """Returns the requests in their order; a refused one is an `EarlyEnd`.

        Args:
            namespace: of the cache, for all of them; None gives each one of its own, which nobody else can hit.
        """

        def read_one(message: pb.Request) -> LiveRequest | EarlyEnd:
            try:
                own = CacheNamespace(salt=secrets.token_hex(_PRIVATE_SALT_BYTES)) if namespace is None else namespace
                return self._make_live(to_request(message, self._encoder, own), trace_context, arrived_s)
            except Exception as error:
                return refuse(RequestId(message.id), error)

        return [read_one(message) for message in batch.requests]

    def _make_live(self, request: Request, trace_context: Mapping[str, str], arrived_s: float) -> LiveRequest:
        return LiveRequest(
            request,
            OutputText(self._tokenizer, request.prompt_ids, request.params.stop),
            arrived_s,
            trace_context,
            self._tokenizer.decode(request.prompt_ids) if self._has_prompts_in_log else None,
        )


def refuse(request_id: RequestId, error: Exception) -> EarlyEnd:
    """The end of a request that an error keeps from being served."""
    reason = find_refusal(error) or Refusal.FAILED
    details = describe_error(error)[1].removeprefix(f"request {request_id}: ")
    return EarlyEnd(request_id, reason.value, f"The request was refused: {details}")


def to_request(message: pb.Request, encoder: PromptEncoder, namespace: CacheNamespace = SHARED_NAMESPACE) -> Request:
    """Converts one request. An adapter is passed over: none is loaded here, and routers send the model's name as one.

    Raises:
        UnsupportedRequestError: it asks for a grammar.
        RequestError: it has no text, or something in it is out of range; the message names the request.
    """
    request_id = RequestId(message.id)
    params = _to_params(message)
    prompt_ids = encoder.encode(request_id, _prompt_text(message), message.truncate, message.add_special_tokens)
    return Request(request_id, prompt_ids, params, namespace)


def fit_output(request: Request, capacity: Capacity) -> Request:
    """Lowers max_new_tokens to what fits beside the prompt, at least 1: a client may count tokens otherwise."""
    num_free_tokens = max(1, capacity.max_total_tokens - len(request.prompt_ids))
    if request.params.max_new_tokens <= num_free_tokens:
        return request
    return replace(request, params=replace(request.params, max_new_tokens=num_free_tokens))


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
        raise UnsupportedRequestError(
            f"request {message.id}: grammars are not supported yet; leave the grammar, tools and response_format out"
        )
    try:
        return SamplingParams(
            max_new_tokens=min(max(stopping.max_new_tokens, 1), MAX_NEW_TOKENS),
            ignore_eos=stopping.ignore_eos_token,
            stop=tuple(stopping.stop_sequences),
            do_sample=chooser.do_sample,
            temperature=min(chooser.temperature, _MAX_SCALE),
            top_k=chooser.top_k,
            top_p=min(chooser.top_p, 1.0),
            typical_p=min(chooser.typical_p, 1.0),
            seed=chooser.seed,
            repetition_penalty=_bound_scale(chooser.repetition_penalty or 1.0),
            relative_frequency_penalty=_bound_frequency_penalty(chooser.frequency_penalty),
            watermark=chooser.watermark,
            top_n_tokens=message.top_n_tokens,
            prefill_logprobs=message.prefill_logprobs,
        )
    except RequestError as error:
        raise RequestError(f"request {message.id}: {error}") from None


def _bound_scale(penalty: float) -> float:
    return min(max(penalty, _MIN_SCALE), _MAX_SCALE) if penalty > 0 else penalty


def _bound_frequency_penalty(penalty: float) -> float:
    return math.copysign(_MAX_FREQUENCY_PENALTY, penalty) if math.isinf(penalty) else penalty
