"""The one door to matplotlib, which is an extra."""

from __future__ import annotations

from pagedkv.plugin.errors import ConfigError


def require_matplotlib() -> None:
    """Raises ConfigError where it is not installed: better before a long run than after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'pagedkv[bench]'") from error
