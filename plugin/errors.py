"""Every error that pagedkv raises on purpose, as one tree.

A caller can tell apart what it should do: fix the request (`RequestError`), fix the installation or its config
(`ConfigError`, `PluginError`), wait or send less (`CapacityError`), or report a fault (`StepError`, `IntegrityError`).
Each protocol adapter maps the classes to its own codes in one table.
"""

from __future__ import annotations

from collections.abc import Collection


class PagedKVError(Exception):
    """Base of every error raised on purpose. Its text says what is wrong and what to change."""


class ConfigError(PagedKVError):
    """A config file, flag or environment variable is wrong."""


class PluginError(PagedKVError):
    """A plugin is unknown, fails to import, or does not fit its interface."""


class UnsupportedError(PagedKVError):
    """This model, device or KV dtype can't be served by the chosen plugins; the text lists every reason."""


class RequestError(PagedKVError):
    """A request is wrong in itself: sending it again unchanged fails again."""


class CapacityError(RequestError):
    """A request is longer than the model, the limits or the whole cache can ever hold."""


class NotFoundError(PagedKVError):
    """A batch or a request is named that is not here."""


class DuplicateRequestError(RequestError):
    """A request id is used that is still live."""


class UnavailableError(PagedKVError):
    """The server is starting, draining or closed: try later or elsewhere."""


class StepError(PagedKVError):
    """A step failed while it ran. The requests it names are gone and their blocks are back; all others live on."""

    def __init__(self, message: str, request_ids: Collection[int]) -> None:
        super().__init__(message)
        self.request_ids = frozenset(request_ids)


class IntegrityError(PagedKVError):
    """The bookkeeping contradicts itself (`check_integrity`) or a block is released twice: a bug of ours."""


class ShardError(PagedKVError):
    """The processes that serve one model together can't go on, or can't join: one is missing, has ended, failed, or
    decided otherwise than the others. The text names the rank."""
