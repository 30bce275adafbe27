"""Every error that pagedkv raises on purpose, as one tree.

A caller can tell apart what it should do: fix the request (`RequestError`), fix the installation or its config
(`ConfigError`, `PluginError`), wait or send less (`CapacityError`), or report a fault (`StepError`, `IntegrityError`).
Each protocol adapter maps the classes to its own codes in one table.
"""

from __future__ import annotations

from collections.abc import Collection


class PagedKVError(Exception):
    """Base of every error raised on purpose. Its message says what is wrong and what to change."""


class ConfigError(PagedKVError):
    """A config file, flag or environment variable is wrong."""


class PluginError(PagedKVError):
    """A plugin is unknown, fails to import, or does not fit its interface."""


class UnsupportedError(PagedKVError):
    """The chosen plugins can't serve this model, device or KV dtype; the message lists every reason."""


class RequestError(PagedKVError):
    """A request is invalid: sending it again unchanged fails again."""


class CapacityError(RequestError):
    """A request is longer than the model, the limits or the whole cache can ever hold."""


class UnsupportedRequestError(RequestError):
    """A request asks for something that this server can't do."""


class NotFoundError(PagedKVError):
    """A call names a batch or a request that does not exist."""


class ForbiddenError(PagedKVError):
    """The caller may not do this; the message says who may."""


class DuplicateRequestError(RequestError):
    """A new request has the id of a live one."""


class UnavailableError(PagedKVError):
    """The server is starting, draining or closed: try later or elsewhere."""


class OverloadedError(PagedKVError):
    """More requests run and wait here than are allowed at once: try again later or elsewhere."""


class DrainingError(UnavailableError):
    """The server is draining: it finishes what runs, and takes nothing new."""


class StepError(PagedKVError):
    """A step failed while it ran. The requests it names have ended and their blocks are free; all others continue."""

    def __init__(self, message: str, request_ids: Collection[int]) -> None:
        super().__init__(message)
        self.request_ids = frozenset(request_ids)


class IntegrityError(PagedKVError):
    """The bookkeeping contradicts itself (`check_integrity`) or a block is released twice: a bug of ours."""


class ShardError(PagedKVError):
    """The shards of a model can't continue or can't join: one is missing, has ended, has failed, or has made another
    decision than the others. The message names the rank."""
