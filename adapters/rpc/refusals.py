"""Which errors refuse a request, and the reason that each counts as."""

from __future__ import annotations

from pagedkv.plugin.errors import (
    CapacityError,
    DrainingError,
    DuplicateRequestError,
    NotFoundError,
    OverloadedError,
    PagedKVError,
    RequestError,
    UnavailableError,
    UnsupportedRequestError,
)
from pagedkv.plugin.observer import Refusal

REFUSALS: dict[type[PagedKVError], Refusal] = {
    CapacityError: Refusal.TOO_LONG,
    DuplicateRequestError: Refusal.DUPLICATE,
    UnsupportedRequestError: Refusal.UNSUPPORTED,
    RequestError: Refusal.INVALID,
    NotFoundError: Refusal.UNKNOWN_BATCH,
    OverloadedError: Refusal.OVERLOADED,
    DrainingError: Refusal.DRAINING,
    UnavailableError: Refusal.NOT_READY,
}
"""The errors with which new requests are refused. Any other error ends requests that were already accepted."""


def find_refusal(error: Exception) -> Refusal | None:
    """The refusal reason that an error of a new request counts as; None if it had been accepted."""
    return next((REFUSALS[base] for base in type(error).__mro__ if base in REFUSALS), None)
