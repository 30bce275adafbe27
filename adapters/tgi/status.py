"""Maps errors to gRPC status codes and back."""

from __future__ import annotations

import grpc

from pagedkv.adapters.rpc import calls
from pagedkv.plugin.errors import (
    ForbiddenError,
    NotFoundError,
    PagedKVError,
    RequestError,
    StepError,
    UnavailableError,
)
from pagedkv.plugin.observer import Refusal

STATUS_CODES: dict[type[PagedKVError], grpc.StatusCode] = {
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    ForbiddenError: grpc.StatusCode.PERMISSION_DENIED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    StepError: grpc.StatusCode.INTERNAL,
}
"""A subclass that is not listed has the code of its nearest base: CapacityError and DuplicateRequestError are
RequestErrors. Any other exception is a fault of the server: INTERNAL."""


def describe_error(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Returns the status code and details for an exception; see `pagedkv.adapters.rpc.calls.describe_error`."""
    return calls.describe_error(error, STATUS_CODES)


def read_error(code: grpc.StatusCode, details: str) -> PagedKVError:
    """Returns the exception that a client raises for a status."""
    kinds: dict[grpc.StatusCode, type[PagedKVError]] = {
        grpc.StatusCode.INVALID_ARGUMENT: RequestError,
        grpc.StatusCode.RESOURCE_EXHAUSTED: RequestError,
        grpc.StatusCode.NOT_FOUND: NotFoundError,
        grpc.StatusCode.PERMISSION_DENIED: ForbiddenError,
        grpc.StatusCode.UNAVAILABLE: UnavailableError,
    }
    return kinds.get(code, PagedKVError)(details)


def read_refusal(reason: str, text: str) -> PagedKVError:
    """Returns the exception that a client raises for a request that was refused or failed alone.

    Args:
        reason: a refusal's value, or "failed".
        text: what the server says of it; may be empty.
    """
    text = text or f"the server ended the request ({reason}); its log says why"
    if reason in (Refusal.DRAINING.value, Refusal.NOT_READY.value):
        return UnavailableError(text)
    return PagedKVError(text) if reason == Refusal.FAILED.value else RequestError(text)
