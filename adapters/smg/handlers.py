"""gRPC handlers of the worker: bytes are parsed here and every error becomes a status."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from pagedkv.adapters.rpc.calls import Context, StatusCodes, describe_error, parse_message
from pagedkv.adapters.smg import engine_pb2 as pb
from pagedkv.adapters.smg.kv_events import EventGapError, UnknownEventNumberError
from pagedkv.adapters.smg.worker import SmgWorker
from pagedkv.plugin.errors import (
    NotFoundError,
    OverloadedError,
    RequestError,
    StepError,
    UnavailableError,
    UnsupportedError,
)

SERVICE_NAME = "vllm.grpc.engine.VllmEngine"

STATUS_CODES: StatusCodes = {
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StepError: grpc.StatusCode.INTERNAL,
    UnsupportedError: grpc.StatusCode.UNIMPLEMENTED,
    UnknownEventNumberError: grpc.StatusCode.OUT_OF_RANGE,
    EventGapError: grpc.StatusCode.DATA_LOSS,
}
"""The gateway repeats a request that got UNAVAILABLE or RESOURCE_EXHAUSTED, elsewhere if it can; never one of INTERNAL
or INVALID_ARGUMENT."""

Unary = Callable[[Any, Context], Awaitable[Message]]
Streaming = Callable[[Any, Context], Awaitable[None]]


def worker_handler(get_worker: Callable[[], SmgWorker]) -> grpc.GenericRpcHandler:
    """Handlers of all methods that a text model has; gRPC answers the others with UNIMPLEMENTED.

    Args:
        get_worker: the worker; called at each call, raises UnavailableError while there is none.
    """
    unary: dict[str, tuple[str, type[Message]]] = {
        "Abort": ("abort", pb.AbortRequest),
        "HealthCheck": ("health_check", pb.HealthCheckRequest),
        "GetModelInfo": ("get_model_info", pb.GetModelInfoRequest),
        "GetServerInfo": ("get_server_info", pb.GetServerInfoRequest),
        "GetLoads": ("get_loads", pb.GetLoadsRequest),
        "FlushCache": ("flush_cache", pb.FlushCacheRequest),
    }
    streaming: dict[str, tuple[str, type[Message]]] = {
        "Generate": ("generate", pb.GenerateRequest),
        "GetTokenizer": ("get_tokenizer", pb.GetTokenizerRequest),
        "SubscribeKvEvents": ("subscribe_kv_events", pb.SubscribeKvEventsRequest),
    }
    methods = {
        **{name: grpc.unary_unary_rpc_method_handler(_unary(get_worker, *entry)) for name, entry in unary.items()},
        **{
            name: grpc.unary_stream_rpc_method_handler(_streaming(get_worker, *entry))
            for name, entry in streaming.items()
        },
    }
    return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)


def _unary(
    get_worker: Callable[[], SmgWorker], name: str, kind: type[Message]
) -> Callable[[bytes, Context], Awaitable[bytes]]:
    async def handle(data: bytes, context: Context) -> bytes:
        try:
            method: Unary = getattr(get_worker(), name)
            return (await method(parse_message(kind, data), context)).SerializeToString()
        except Exception as error:
            code, details = describe_error(error, STATUS_CODES)
        return await context.abort(code, details)

    return handle


def _streaming(
    get_worker: Callable[[], SmgWorker], name: str, kind: type[Message]
) -> Callable[[bytes, Context], Awaitable[None]]:
    async def handle(data: bytes, context: Context) -> None:
        try:
            method: Streaming = getattr(get_worker(), name)
            await method(parse_message(kind, data), context)
            return
        except Exception as error:
            code, details = describe_error(error, STATUS_CODES)
        await context.abort(code, details)

    return handle
