"""The tokenizer's files as one zip, for gateways on machines that do not have them."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from pagedkv.adapters.smg import engine_pb2 as pb

CHUNK_BYTES = 64 * 1024
MAX_FILES = 50
"""More the gateway does not take."""

_PATTERNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)


def build_archive(directory: Path) -> bytes:
    """A zip of what a tokenizer is made from; the same bytes for the same files."""
    found = sorted({path for pattern in _PATTERNS for path in directory.glob(pattern) if path.is_file()})[:MAX_FILES]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in found:
            archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def split_archive(data: bytes) -> Iterator[pb.GetTokenizerChunk]:
    """The messages of GetTokenizer; the last one has the digest of the whole."""
    for start in range(0, len(data), CHUNK_BYTES):
        is_last = start + CHUNK_BYTES >= len(data)
        yield pb.GetTokenizerChunk(
            data=data[start : start + CHUNK_BYTES], sha256=hashlib.sha256(data).hexdigest() if is_last else ""
        )
