"""Tile instructions and their software version: the order of sums, denormals, shapes, and permission."""

import ctypes
import errno
import re
import subprocess
from pathlib import Path

import pytest
import torch

from pagedkv.kernels.cpu import compiler

SHIM = """
#include "tiles.h"

int find_error(void) { return find_tiles_error(); }

#if HAS_TILES
void multiply(const void *a, const void *b, float *c, int64_t rows, int64_t pairs, int64_t columns) {
    TileConfig config = {0};
    set_tile(&config, 0, rows, columns * 4);
    set_tile(&config, 4, rows, pairs * 4);
    set_tile(&config, 7, pairs, columns * 4);
    configure_tiles(&config);
    tile_zero(0);
    tile_load(0, c, 64);
    tile_load(4, a, pairs * 4);
    tile_load(7, b, columns * 4);
    tile_dot_bf16(0, 4, 7);
    tile_store(0, c, 64);
    release_tiles();
}
#endif
"""
CPU_FLAGS = re.search(r"^flags.*$|\Z", Path("/proc/cpuinfo").read_text(), re.MULTILINE).group().split()
BUILDS = [pytest.param(("-DSOFTWARE_TILES",), id="software")]
if "amx_bf16" in CPU_FLAGS:
    BUILDS.append(pytest.param((), id="hardware"))
TINY = 2.0**-126


def build(folder: Path, *flags: str) -> ctypes.CDLL:
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text(SHIM)
    options = ("-std=gnu11", "-O3", "-Werror", "-fPIC", "-shared", "-pthread", f"-I{compiler.SOURCE_DIR}")
    command = ["cc", *options, *compiler.native_flags(), *flags, str(source), "-lm", "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module", params=BUILDS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    built = build(tmp_path_factory.mktemp("tiles"), *request.param)
    assert built.find_error() == 0
    return built


def multiply(library: ctypes.CDLL, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """c + a × b by a tile, a: [rows, depth] and b: [depth, columns] bf16, c: [rows, columns] float32."""
    out = torch.full((16, 16), float("nan"))
    out[: c.shape[0], : c.shape[1]] = c
    pairs = b.view(b.shape[0] // 2, 2, -1).transpose(1, 2).contiguous()
    sizes = (ctypes.c_int64(a.shape[0]), ctypes.c_int64(a.shape[1] // 2), ctypes.c_int64(b.shape[1]))
    library.multiply(*(ctypes.c_void_p(x.data_ptr()) for x in (a.contiguous(), pairs, out)), *sizes)
    assert out[c.shape[0] :].isnan().all()
    assert out[:, c.shape[1] :].isnan().all()
    return out[: c.shape[0], : c.shape[1]]


def expected(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """The documented order. Products and, nearly always, sums are exact in float64."""
    halves = []
    for first in (0, 1):
        total = torch.zeros_like(c)
        for k in range(first, a.shape[1], 2):
            total = (total.double() + a[:, k, None].double() * b[k].double()).float()
        halves.append(total)
    return c + (halves[0] + halves[1])


@pytest.mark.parametrize(("rows", "pairs", "columns"), [(16, 16, 16), (1, 16, 16), (5, 8, 16), (16, 1, 4), (3, 3, 7)])
def test_sums_have_the_documented_order(library: ctypes.CDLL, rows: int, pairs: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    a = torch.randn(rows, 2 * pairs, generator=generator).bfloat16()
    b = torch.randn(2 * pairs, columns, generator=generator).bfloat16()
    c = torch.randn(rows, columns, generator=generator)
    assert torch.equal(multiply(library, a, b, c), expected(a, b, c))


def test_the_order_shows(library: ctypes.CDLL) -> None:
    """Ones are lost beside 2^24 in the even sum, and not in the odd one."""
    a = torch.ones(1, 32).bfloat16()
    b = torch.ones(32, 1).bfloat16()
    b[0] = 2.0**24
    assert multiply(library, a, b, torch.zeros(1, 1)).item() == 2.0**24 + 16


def test_a_row_has_the_same_bits_among_others(library: ctypes.CDLL) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 16, 32, generator=generator).bfloat16()
    b, c = b.view(32, 16), torch.randn(16, 16, generator=generator)
    together = multiply(library, a, b, c)
    for row in range(16):
        assert torch.equal(multiply(library, a[row : row + 1], b, c[row : row + 1])[0], together[row])


@pytest.mark.parametrize(
    ("a", "b", "c", "result"),
    [
        pytest.param(TINY / 2, 1.0, 0.0, 0.0, id="factor"),
        pytest.param(TINY, 0.5, 0.0, 0.0, id="product"),
        pytest.param(0.0, 1.0, TINY / 2, 0.0, id="sum before"),
        pytest.param(TINY * 1.5, 1.0, -TINY, 0.0, id="sum after"),
        pytest.param(TINY, 1.0, 0.0, TINY, id="the smallest normal"),
        pytest.param(float("inf"), 1.0, 0.0, float("inf"), id="infinity"),
    ],
)
def test_denormals_are_zero(library: ctypes.CDLL, a: float, b: float, c: float, result: float) -> None:
    rows = torch.tensor([[a, 0.0]]).bfloat16(), torch.tensor([[b], [0.0]]).bfloat16()
    assert multiply(library, *rows, torch.tensor([[c]])).item() == result


def test_nan_stays_in_its_row_and_column(library: ctypes.CDLL) -> None:
    a, b = torch.ones(3, 4).bfloat16(), torch.ones(4, 5).bfloat16()
    a[1, 2], b[3, 4] = float("nan"), float("nan")
    found = multiply(library, a, b, torch.zeros(3, 5)).isnan()
    wanted = torch.zeros(3, 5, dtype=torch.bool)
    wanted[1], wanted[:, 4] = True, True
    assert torch.equal(found, wanted)


def test_a_refusal_is_told_with_its_error(tmp_path: Path) -> None:
    refused = build(tmp_path, "-DSOFTWARE_TILES", f"-DREFUSED_TILES={errno.EPERM}")
    assert refused.find_error() == errno.EPERM


def test_without_the_instructions_there_are_none(tmp_path: Path) -> None:
    if "amx_bf16" in CPU_FLAGS:
        pytest.skip("this CPU has them")
    assert build(tmp_path).find_error() == errno.ENOSYS
