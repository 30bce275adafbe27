"""Checks that the model server behind a router is pagedkv, and not the one that it replaces."""

from __future__ import annotations

import asyncio

from pagedkv.plugin.errors import ConfigError, PagedKVError, UnavailableError
from pagedkv.plugin.registry import KERNELS, list_entry_points

STOCK_ATTENTION = frozenset({"paged", "flashdecoding", "flashdecoding-ipex", "flashinfer"})
"""The values of Info.attention_impl of text-generation-inference's own Python server."""


async def check_server(target: str, timeout_s: float) -> str:
    """Asks a server for its Info and returns the name of its attention kernels.

    Args:
        target: "unix:PATH", "HOST:PORT", or the path of a socket.
        timeout_s: for connection and answer.

    Raises:
        UnavailableError: nobody answers.
        ConfigError: the server is another one.
    """
    from pagedkv.adapters.tgi.client import GenerationClient

    async with GenerationClient(target) as client:
        try:
            info = await asyncio.wait_for(client.info(), timeout_s)
        except asyncio.TimeoutError:
            raise UnavailableError(f"{target} does not answer within {timeout_s:g} s") from None
        except PagedKVError as error:
            raise UnavailableError(f"{target} does not answer: {error}") from error
    if not is_ours(info.attention_impl):
        raise ConfigError(
            f"another model server than pagedkv answers on {target}: its attention is {info.attention_impl!r}; put the "
            "folder of pagedkv install-launcher-shim first on the launcher's PATH"
        )
    return info.attention_impl


def is_ours(attention_impl: str) -> bool:
    """Whether an Info.attention_impl is pagedkv's: the name of installed kernels, or of the contiguous backend's."""
    if attention_impl in {point.name for point in list_entry_points(KERNELS)}:
        return True
    return bool(attention_impl) and attention_impl not in STOCK_ATTENTION
