"""Logs one line for each ended request."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

from pagedkv.plugin.observer import Outcome, Refusal, RequestEnd

logger = logging.getLogger(__name__)

_DIGITS = 4


class RequestLog:
    """A `RequestObserver` that logs. The fields are also in the log record's `fields`, for handlers that write JSON."""

    def on_first_token(self, queue_s: float | None, ttft_s: float) -> None:
        """Logs nothing: the line of the request's end has these times."""

    def on_end(self, end: RequestEnd) -> None:
        fields = describe(end)
        level = logging.WARNING if end.outcome is Outcome.FAILED else logging.INFO
        logger.log(level, "request ended: %s", to_text(fields), extra={"fields": fields})

    def on_refusal(self, reason: Refusal, num_requests: int) -> None:
        """Logs nothing: the client gets the reason in the status of its call."""


def describe(end: RequestEnd) -> dict[str, Any]:
    """The fields of the log line. Times are in seconds; None if there was no token."""
    fields: dict[str, Any] = {
        "request_id": end.request_id,
        "reason": end.outcome.value,
        "prompt_tokens": end.num_prompt_tokens,
        "cached_tokens": end.num_cached_tokens,
        "generated_tokens": end.num_generated_tokens,
        "queue_s": _round(end.queue_s),
        "ttft_s": _round(end.ttft_s),
        "total_s": _round(end.total_s),
    }
    if end.external_id:
        fields["external_id"] = end.external_id
    if "traceparent" in end.trace_context:
        fields["traceparent"] = end.trace_context["traceparent"]
    if end.prompt is not None:
        fields["prompt"] = end.prompt
    return fields


def to_text(fields: dict[str, Any]) -> str:
    """Formats fields as "name=value name=value". Texts are quoted, so that a client can't forge a line or a field.

    >>> to_text({"request_id": 7, "reason": "length", "ttft_s": None, "prompt": "two\\nlines"})
    'request_id=7 reason=length ttft_s=- prompt="two\\\\nlines"'
    """
    return " ".join(f"{name}={_to_word(value)}" for name, value in fields.items())


def _to_word(value: Any) -> str:
    if value is None:
        return "-"
    text = str(value)
    return text if re.fullmatch(r"[\w.-]+", text, re.ASCII) else json.dumps(text)


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, _DIGITS)
