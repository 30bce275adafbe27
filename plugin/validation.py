"""Checks requests before a backend accepts them; the same checks for every backend."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from pagedkv.plugin.errors import CapacityError, DuplicateRequestError, RequestError
from pagedkv.plugin.requests import Request, RequestId


def validate_requests(
    requests: Sequence[Request],
    live_ids: Collection[RequestId],
    vocab_size: int,
    max_input_tokens: int,
    max_total_tokens: int,
) -> None:
    """Checks requests against the model and the limits. Raises the first fault; the message names its request.

    Raises:
        RequestError: an empty prompt, an id outside the vocabulary, an id of a request outside 64 bits.
        CapacityError: a prompt longer than max_input_tokens, or longer than max_total_tokens with its output.
        DuplicateRequestError: an id is in use, or occurs twice in `requests`.
    """
    seen: set[RequestId] = set()
    for request in requests:
        if not 0 <= request.id < 2**64:
            raise RequestError(f"the request id {request.id} is not an unsigned 64-bit number")
        if request.id in live_ids or request.id in seen:
            raise DuplicateRequestError(f"request {request.id} is running already; ids are free again after the end")
        seen.add(request.id)
        _validate_prompt(request, vocab_size)
        _validate_length(request, max_input_tokens, max_total_tokens)


def _validate_prompt(request: Request, vocab_size: int) -> None:
    if len(request.prompt_ids) == 0:
        raise RequestError(f"request {request.id}: the prompt has no tokens; send at least one")
    try:
        token_ids = np.asarray(request.prompt_ids, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        raise RequestError(f"request {request.id}: the prompt holds something that is no token id") from None
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if outside.size:
        raise RequestError(
            f"request {request.id}: token id {outside[0]} is outside the model's vocabulary of {vocab_size}"
        )


def _validate_length(request: Request, max_input_tokens: int, max_total_tokens: int) -> None:
    num_prompt_tokens = len(request.prompt_ids)
    if num_prompt_tokens > max_input_tokens:
        raise CapacityError(
            f"request {request.id}: the prompt has {num_prompt_tokens} tokens, the limit is {max_input_tokens}; "
            "shorten it, or set truncate"
        )
    if num_prompt_tokens + request.params.max_new_tokens > max_total_tokens:
        raise CapacityError(
            f"request {request.id}: {num_prompt_tokens} prompt tokens and max_new_tokens "
            f"{request.params.max_new_tokens} exceed the limit of {max_total_tokens} tokens together"
        )
