"""Compiles the C sources on first use with the system's compiler, for this CPU, and caches the result.

The library is linked against the OpenMP runtime that torch has loaded, so that both use the same threads. A second
thread pool would compete with torch's, whose threads still spin when an attention call begins.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

from pagedkv.plugin.errors import PagedKVError

SOURCE_DIR = Path(__file__).parent / "csrc"
SOURCES = {"attention": SOURCE_DIR, "decoder": SOURCE_DIR / "decoder"}
"""Folders of the C files of each library. All may include headers of `SOURCE_DIR`."""
OPTIMIZATION_FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math")
LIBRARY_FLAGS = ("-fPIC", "-fvisibility=hidden", "-fopenmp")

_COMPILERS = ("cc", "gcc", "clang")
_OPENMP_NAMES = ("libgomp", "libiomp5", "libomp")
_TIMEOUT_S = 300


class CompilerError(PagedKVError):
    """The library can't be compiled on this machine; the message says why."""


def native_flags() -> tuple[str, ...]:
    """Compiler flags that allow all instructions of this CPU."""
    return ("-march=native",) if platform.machine() in ("x86_64", "AMD64", "i686") else ("-mcpu=native",)


@cache
def load_library(extra_flags: tuple[str, ...] = (), name: str = "attention") -> ctypes.CDLL:
    """Returns the compiled library, from the cache if it was compiled before.

    Args:
        extra_flags: for the compiler, after the native ones.
        name: one of `SOURCES`.

    Raises:
        CompilerError: there is no compiler, or it failed.
    """
    try:
        return ctypes.CDLL(str(build_library(extra_flags, name)))
    except OSError as error:
        raise CompilerError(f"the compiled kernels can't be kept or loaded: {error}") from error


def build_library(extra_flags: tuple[str, ...] = (), name: str = "attention") -> Path:
    """The file of the compiled kernels, which need not run on this CPU. Arguments and errors are those of
    `load_library`, and OSError where the file can't be written."""
    if not sys.platform.startswith("linux"):
        raise CompilerError(f"the C kernels are for Linux, not {sys.platform}")
    compiler = _find_compiler()
    openmp = _find_openmp()
    flags = (*OPTIMIZATION_FLAGS, *native_flags(), *extra_flags, *LIBRARY_FLAGS)
    path = cache_dir() / f"{name}-{_fingerprint(compiler, flags, openmp)}.so"
    if not path.exists():
        _build_once(SOURCES[name], compiler, flags, openmp, path)
    return path


def _compile_object(source: Path, target: Path, flags: Sequence[str]) -> None:
    """Compiles one C file. Raises CompilerError, with the compiler's output, if it fails."""
    _run([_find_compiler(), *flags, "-c", str(source), "-o", str(target)])


def _build_once(sources: Path, compiler: str, flags: Sequence[str], openmp: Path | None, path: Path) -> None:
    """Processes that need a library at the same time, as shards do, wait for the one that compiles it."""
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            _build(sources, compiler, flags, openmp, path)


def _build(sources: Path, compiler: str, flags: Sequence[str], openmp: Path | None, path: Path) -> None:
    """Compiles and links next to `path`, then renames, so that another process never sees an incomplete library."""
    with tempfile.TemporaryDirectory(dir=path.parent) as build_dir:
        objects = []
        for source in sorted(sources.glob("*.c")):
            objects.append(Path(build_dir) / f"{source.stem}.o")
            _compile_object(source, objects[-1], flags)
        library = Path(build_dir) / path.name
        # With the runtime's file name instead of -fopenmp, the loader uses the runtime that torch has loaded.
        runtime = [str(openmp)] if openmp else ["-fopenmp"]
        _run([compiler, "-shared", *map(str, objects), *runtime, "-lm", "-o", str(library)])
        os.replace(library, path)


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"the C compiler did not run: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise CompilerError(f"the C compiler {command[0]} failed: {' | '.join(lines[:3])}")


def _find_compiler() -> str:
    named = os.environ.get("CC", "")
    for name in (named, *_COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise CompilerError(f"no C compiler found ({', '.join(_COMPILERS)}, or what CC names); install gcc or clang")


def _find_openmp() -> Path | None:
    """Returns the OpenMP runtime that torch has loaded in this process, or None."""
    torch.get_num_threads()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith(_OPENMP_NAMES):
            return path
    return None


def _fingerprint(compiler: str, flags: Sequence[str], openmp: Path | None) -> str:
    """Hashes everything that a library depends on: sources, compiler, flags, CPU, runtime."""
    digest = hashlib.sha256(hash_sources().encode())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    for part in (compiler, version.stdout, *flags, str(openmp), platform.machine(), cpu_description()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


@cache
def hash_sources() -> str:
    """Hashes the C sources of all libraries."""
    digest = hashlib.sha256()
    for source in sorted(SOURCE_DIR.rglob("*")):
        if source.suffix in (".c", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def cpu_description() -> str:
    """Model and instruction sets of the CPU, from Linux."""
    keys = ("model name", "flags", "CPU part", "Features")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(keys)}))


def cache_dir() -> Path:
    """The user's cache directory, or one for this process only if that is not writable."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "pagedkv" / "kernels"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except (OSError, RuntimeError):
        return _process_dir()


@cache
def _process_dir() -> Path:
    return Path(tempfile.mkdtemp(prefix="pagedkv-kernels-"))
