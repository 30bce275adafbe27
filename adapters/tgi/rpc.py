"""Handlers between gRPC and the service: parse the bytes of a call and turn every error into a status."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.status import describe_error
from pagedkv.plugin.errors import RequestError

SERVICE = pb.DESCRIPTOR.services_by_name["TextGenerationService"]

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
Method: TypeAlias = Callable[[Any, Context], Awaitable[Message]]


TRACE_HEADERS = ("traceparent", "tracestate")
"""Headers of W3C Trace Context, which routers send with a call."""


def read_trace_context(context: Context) -> dict[str, str]:
    """Returns the trace context that a client sent with a call; empty if it sent none."""
    return {key: str(value) for key, value in context.invocation_metadata() or () if key in TRACE_HEADERS}


def service_handler(service: object) -> grpc.GenericRpcHandler:
    """Returns handlers for all methods of `TextGenerationService`; `service` has them in snake_case.

    With the generated code gRPC parses the bytes, and answers bytes that are no message with INTERNAL.
    """
    methods = {
        method.name: grpc.unary_unary_rpc_method_handler(
            _handle(getattr(service, _snake_case(method.name)), getattr(pb, method.input_type.name))
        )
        for method in SERVICE.methods
    }
    return grpc.method_handlers_generic_handler(SERVICE.full_name, methods)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _handle(method: Method, request_type: type[Message]) -> Callable[[bytes, Context], Awaitable[bytes]]:
    async def handle(data: bytes, context: Context) -> bytes:
        try:
            return (await method(_parse(request_type, data), context)).SerializeToString()
        except Exception as error:
            code, details = describe_error(error)
        return await context.abort(code, details)

    return handle


def _parse(request_type: type[Message], data: bytes) -> Message:
    try:
        return request_type.FromString(data)
    except DecodeError:
        raise RequestError(
            f"the bytes are no {request_type.DESCRIPTOR.full_name}: cut short, another type, or text that is no UTF-8"
        ) from None
