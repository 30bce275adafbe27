"""Runs the tests of the triton kernels in triton's interpreter, where there is no GPU.

The interpreter must be chosen before triton is imported, which another test of this process may have done already: so
each part runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PARTS = {
    "storage": ("test_triton_conformance.py", "spec_counts or read_returns or stored_nowhere or copied"),
    "attention": (
        "test_triton_conformance.py",
        "float16-fp16 and (every_precision or head_dims or long_contexts or one_decode or random or strided)",
    ),
    "features": (
        "test_triton_conformance.py",
        "float16-fp16 and not keep_away and (window_and or window_of_one or alibi or wide_values)",
    ),
    "independence": (
        "test_triton_conformance.py",
        "(float16-fp16 or float16-int8) and nan_in_k_and_v or float16-fp16 and padding_rows",
    ),
    "quantized": ("test_triton_quantized.py", ""),
    "4 bits": ("test_triton_int4.py", ""),
    "4 bits read": ("test_triton_conformance.py", "float16-int4 and (every_precision or padding_rows)"),
    "4 bits featured": (
        "test_triton_conformance.py",
        "float16-int4 and (head_dims and 80 or keep_away and int4-all)",
    ),
    "decoder": ("test_triton_decoder.py", ""),
    "benchmark": ("test_triton_bench.py", ""),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests run on the GPU")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", PARTS)
def test_in_the_interpreter(part: str) -> None:
    file, selection = PARTS[part]
    # The suites need nothing of conftest.py, which imports transformers.
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", *options, "-k", selection, str(HERE / file)]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout, run.stdout
