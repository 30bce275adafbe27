"""Texts to evaluate on: the user's files, or texts that come with Python."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.interface import Tokenizer

TextKind = Literal["prose", "code"]
TEXT_KINDS: tuple[TextKind, ...] = ("prose", "code")

_CODE_SUFFIXES = frozenset({".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".rs", ".go", ".js", ".ts", ".java", ".sh"})
_STANDARD_LIBRARY = ("argparse.py", "textwrap.py", "heapq.py", "tarfile.py", "statistics.py", "zipfile.py", "ast.py")
"""Sources of the standard library to use if they exist; more than 100,000 tokens."""


def load_texts(files: Sequence[Path]) -> dict[TextKind, str]:
    """Loads prose and program code, distinguished by the files' suffixes; without files, Python's own texts.

    Raises:
        ConfigError: a file can't be read as UTF-8.
    """
    if not files:
        return {"prose": _python_topics(), "code": _python_sources()}
    texts: dict[TextKind, str] = {}
    for file in files:
        kind: TextKind = "code" if file.suffix in _CODE_SUFFIXES else "prose"
        texts[kind] = texts.get(kind, "") + _read(file) + "\n\n"
    return texts


def cut_sequences(text: str, tokenizer: Tokenizer, num_tokens: int, sequence_tokens: int) -> list[list[int]]:
    """The text's tokens, in order, as whole sequences of `sequence_tokens` and at most `num_tokens` in all.

    Raises:
        ConfigError: the text is shorter than one sequence.
    """
    # Tokenizing takes time, and no language model's tokens have more characters than this on average.
    characters = 12 * num_tokens
    ids = tokenizer.encode(text[:characters], add_special_tokens=False)[:num_tokens]
    num_sequences = len(ids) // sequence_tokens
    if not num_sequences:
        raise ConfigError(
            f"a text has {len(ids)} tokens, one sequence takes {sequence_tokens}; give more text, or shorter sequences"
        )
    return [ids[place * sequence_tokens : (place + 1) * sequence_tokens] for place in range(num_sequences)]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the text {file}: {error}") from error


def _python_topics() -> str:
    """Returns the reference texts of Python's `help()`."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _python_sources() -> str:
    directory = Path(sysconfig.get_path("stdlib"))
    files = [directory / name for name in _STANDARD_LIBRARY if (directory / name).is_file()]
    return "\n\n".join(_read(file) for file in files)
