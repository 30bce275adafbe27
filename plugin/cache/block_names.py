"""Names of full blocks: a hash chain over everything that the KV of a block depends on.

The root hashes what makes the KV of equal tokens differ. Each block's name hashes its parent's name and its tokens, so
one name identifies a whole prefix. BLAKE2b (RFC 7693) is cryptographic, so that no tenant can make a prompt that
collides with another's, and it is the fastest such hash of hashlib on inputs of this size.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from pagedkv.plugin.requests import CacheNamespace

NAME_BYTES = 32

# Different `person` values keep hashes of roots and of blocks apart, whatever their inputs.
_ROOT_PERSON = b"pagedkv root 1"
_BLOCK_PERSON = b"pagedkv block 1"
_BLOCK_HASHER = hashlib.blake2b(digest_size=NAME_BYTES, person=_BLOCK_PERSON)


def hash_root(namespace: CacheNamespace, kv_dtype_name: str, block_size: int) -> bytes:
    """Returns the name of the empty prefix. Hashes every field with its type and length, so that fields can't merge."""
    fields = (
        ("salt", namespace.salt),
        ("adapter_id", namespace.adapter_id),
        ("kv_dtype", kv_dtype_name),
        ("block_size", str(block_size)),
    )
    hasher = hashlib.blake2b(digest_size=NAME_BYTES, person=_ROOT_PERSON)
    for field, value in fields:
        for part in (field.encode(), value.encode("utf-8", "surrogatepass")):
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
    return hasher.digest()


def hash_block(payload: bytes) -> bytes:
    """Returns the name of a block: the hash of its parent's name (32 bytes), then its tokens (4 bytes each)."""
    # Copying a prepared hasher takes half the time of creating one with its parameters.
    hasher = _BLOCK_HASHER.copy()
    hasher.update(payload)
    return hasher.digest()


class BlockNames:
    """Names of one sequence's full blocks. Each is computed when it is first needed, and kept."""

    __slots__ = ("_block_size", "_packed", "_packed_end", "_packed_start", "_token_ids", "names", "root")

    def __init__(self, token_ids: Sequence[int], root: bytes, block_size: int) -> None:
        self._token_ids = token_ids
        self.root = root
        self._block_size = block_size
        self._packed = b""
        self._packed_start = 0
        self._packed_end = 0
        self.names: list[bytes] = []
        """One name for each block that `extend` has reached."""

    def extend(self, num_blocks: int) -> None:
        """Computes the missing names of the first `num_blocks` blocks, which must be full."""
        token_bytes = 4 * self._block_size
        for index in range(len(self.names), num_blocks):
            if index >= self._packed_end:
                self._pack(index)
            offset = (index - self._packed_start) * token_bytes
            parent = self.names[-1] if index else self.root
            payload = parent + self._packed[offset : offset + token_bytes]
            self.names.append(hash_block(payload))

    def _pack(self, start: int) -> None:
        """Packs all full blocks from `start` at once: ten times faster than one by one for a long prompt."""
        self._packed_start = start
        self._packed_end = len(self._token_ids) // self._block_size
        tokens = self._token_ids[start * self._block_size : self._packed_end * self._block_size]
        self._packed = array("I", tokens).tobytes()
