"""How a call reaches the service: bytes are parsed here and every error becomes a status."""

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
"""Of W3C Trace Context, as routers send them with a call."""


def read_trace_context(context: Context) -> dict[str, str]:
    """Where the trace of a call goes on from; empty where the client sends none."""
    return {key: str(value) for key, value in context.invocation_metadata() or () if key in TRACE_HEADERS}


def service_handler(service: object) -> grpc.GenericRpcHandler:
    """Handlers of all methods of `TextGenerationService`, which `service` has in snake_case.

    Generated code would let gRPC parse the bytes, and gRPC answers those that are no message with INTERNAL.
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
