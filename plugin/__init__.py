"""The contract that plugins implement (the files here), and our own plugins and the engine (the folders).

from pagedkv.plugin import Engine, SamplingParams
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagedkv.plugin.requests import SamplingParams

if TYPE_CHECKING:
    from pagedkv.plugin.engine.engine import Engine

__all__ = ["Engine", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # The contract's files import none of the folders below them, so the engine is loaded when it is first asked for.
    if name == "Engine":
        from pagedkv.plugin.threads import spare_quota

        spare_quota()
        from pagedkv.plugin.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
