"""How bytes and errors cross a gRPC call."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from pagedkv.plugin.errors import PagedKVError, RequestError

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
StatusCodes: TypeAlias = Mapping[type[PagedKVError], grpc.StatusCode]

TRACE_HEADERS = ("traceparent", "tracestate")
"""Of W3C Trace Context, as gateways and routers send them with a call."""

MAX_DETAILS = 500
"""Characters of a status' text: it is a header, where one may take 12 bytes and peers refuse more than 8 KiB."""

_Message = TypeVar("_Message", bound=Message)


def parse_message(kind: type[_Message], data: bytes) -> _Message:
    """Parses a call's bytes. gRPC itself would answer those that are no message with INTERNAL.

    Raises:
        RequestError: they are not a `kind`.
    """
    try:
        return kind.FromString(data)
    except DecodeError:
        raise RequestError(
            f"the bytes are no {kind.DESCRIPTOR.full_name}: cut short, another type, or text that is no UTF-8"
        ) from None


def read_trace_context(context: Context) -> dict[str, str]:
    """Trace headers of a call; empty if the client sends none."""
    return {key: str(value) for key, value in context.invocation_metadata() or () if key in TRACE_HEADERS}


def describe_error(error: Exception, codes: StatusCodes) -> tuple[grpc.StatusCode, str]:
    """Status code and text of an exception; a subclass that is not in `codes` has the code of its nearest base.

    Any other exception is logged with its traceback under an id, and only the id is sent: a client that reports it can
    be helped and learns nothing about the server's inside.
    """
    for base in type(error).__mro__:
        if base in codes:
            return codes[base], str(error)[:MAX_DETAILS]
    error_id = uuid.uuid4().hex[:12]
    logger.error("unexpected error %s", error_id, exc_info=error)
    return grpc.StatusCode.INTERNAL, f"internal error {error_id}; the server's log says more under this id"
