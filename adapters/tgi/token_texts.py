"""Adds the text to a backend's new tokens."""

from __future__ import annotations

import math

from pagedkv.adapters.tgi.batches import LiveRequest
from pagedkv.adapters.tgi.convert import EarlyEnd, FinalText, NewToken
from pagedkv.adapters.tgi.prompts import TokenTexts
from pagedkv.adapters.tgi.status import describe_error
from pagedkv.plugin.errors import StepError
from pagedkv.plugin.requests import FinishReason, StepOutput


def push_token(live: LiveRequest, output: StepOutput, texts: TokenTexts) -> NewToken:
    """Appends a request's new token to it.

    Raises:
        StepError: the model's scores for it were no numbers.
        Exception: whatever the tokenizer raises. The request can't go on in both cases; others are not concerned.
    """
    num_generated_tokens = live.num_generated_tokens + 1
    if math.isnan(output.token.logprob):
        raise StepError("the model's scores for the next token are no numbers", [output.request_id])
    text = live.text.push(output.token.token_id)
    reason = output.finish_reason
    if reason is None and live.text.has_stopped:
        reason = FinishReason.STOP_SEQUENCE
    final = None if reason is None else FinalText(live.text.final_text(), num_generated_tokens, reason)
    _refuse_unsendable(text if final is None else text + final.text)
    has_prompt = output.prefill_logprobs is not None
    token = NewToken(
        live.request,
        output,
        text,
        is_first=num_generated_tokens == 1,
        final=final,
        prompt_texts=[texts.text_of(token_id) for token_id in live.request.prompt_ids] if has_prompt else (),
        top_texts=[texts.text_of(top.token_id) for top in output.top_tokens] if output.top_tokens else (),
    )
    live.num_generated_tokens = num_generated_tokens
    return token


def end_failed(live: LiveRequest, error: Exception) -> EarlyEnd:
    """The end of a request that failed on its way, with the text that it had, as far as that can be told."""
    try:
        text = live.text.final_text()
        _refuse_unsendable(text)
    except Exception:
        text = ""
    message = f"The request failed: {describe_error(error)[1]}"
    return EarlyEnd(live.request.id, "failed", message, text, live.num_generated_tokens)


def _refuse_unsendable(text: str) -> None:
    """Raises UnicodeEncodeError for a text that no message can hold."""
    if not text.isascii():
        text.encode("utf-8")
