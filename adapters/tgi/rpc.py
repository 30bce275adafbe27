"""Handlers between gRPC and the service: parse the bytes of a call and turn every error into a status."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message

from pagedkv.adapters.rpc.calls import Context, parse_message
from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.status import describe_error

SERVICE = pb.DESCRIPTOR.services_by_name["TextGenerationService"]

Method: TypeAlias = Callable[[Any, Context], Awaitable[Message]]


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
            return (await method(parse_message(request_type, data), context)).SerializeToString()
        except Exception as error:
            code, details = describe_error(error)
        return await context.abort(code, details)

    return handle
