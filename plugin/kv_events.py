"""What becomes findable in a prefix cache, and what no longer is: for whoever routes requests to where their prefix is.

Both are abilities of a cache manager, and of a backend that has one; a plugin without them is served all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pagedkv.plugin.requests import CacheNamespace


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A full block that has become findable."""

    name: bytes
    """Identifies the whole prefix that ends with the block, and everything its KV depends on."""
    parent_name: bytes | None
    """Of the block before it; None for the first one of a prompt."""
    token_ids: Sequence[int]
    """The block's own tokens, block_size of them."""
    namespace: CacheNamespace


class KVEventListener(Protocol):
    """Hears of blocks, between or in steps, on the thread that runs them. Must return at once and not raise."""

    def on_stored(self, block: StoredBlock) -> None: ...

    def on_removed(self, name: bytes) -> None:
        """The block of this name has been evicted."""

    def on_cleared(self) -> None:
        """No block is findable any more."""


@runtime_checkable
class ReportsKVEvents(Protocol):
    """A cache manager or backend that tells which blocks are findable."""

    def set_kv_event_listener(self, listener: KVEventListener | None) -> bool:
        """Tells `listener` from now on; None ends it. A backend goes on telling after another warm-up.

        Returns:
            Whether it can: a backend may have a cache manager that does not tell.
        """


@runtime_checkable
class FlushesPrefixCache(Protocol):
    """A cache manager or backend whose findable blocks can be dropped."""

    def flush_prefix_cache(self) -> int:
        """Frees every findable block that no sequence holds. Returns their number."""
