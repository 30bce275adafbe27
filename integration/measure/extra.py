"""Checks that the libraries are installed that only measuring needs: the extra `bench`."""

from __future__ import annotations

from importlib.util import find_spec

from pagedkv.plugin.errors import ConfigError

MODULES = ("matplotlib", "psutil")


def require_bench_extra() -> None:
    """Raises ConfigError if a library of the extra is missing. Call it before a long run, not after it."""
    missing = [name for name in MODULES if find_spec(name) is None]
    if missing:
        raise ConfigError(f'this needs {" and ".join(missing)}, not installed here: pip install "pagedkv[bench]"')
