"""The GPU benchmark: its checks of values, run on few layers, and its answer on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from pagedkv.integration.measure.micro import gpu, gpu_steps
from pagedkv.kernels.triton.provider import TritonKernels, is_interpreted
from pagedkv.plugin.backend.graphs import PaddedDecodes
from pagedkv.plugin.kv_dtypes import FP16
from pagedkv.plugin.model_spec import AttentionSpec

needs_kernels = pytest.mark.skipif(
    not is_interpreted() and not torch.cuda.is_available(),
    reason="run by test_triton_interpreter.py, in its own process",
)
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
CASE = gpu.Case(AttentionSpec(4, 2, 32, 32), FP16, torch.float16, "plain")


@needs_kernels
def test_right_values_pass_and_wrong_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LENGTHS", [(0, 1), (40, 1), (3, 9)])
    kernels = TritonKernels.create(DEVICE)
    refused = replace(CASE, spec=AttentionSpec(1, 1, 33, 32))
    report = gpu.check_values(kernels, DEVICE, [CASE, refused])
    assert report["failures"] == []
    assert [line.partition(":")[0] for line in report["refused"]] == ["float16, fp16, plain"]
    right = kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda *arguments: right(*arguments) * 1.01)
    assert len(gpu.check_values(kernels, DEVICE, [CASE])["failures"]) == 1


@needs_kernels
def test_steps_by_graph_are_held_against_those_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attention = AttentionSpec(2, 1, 16, 16)
    shape = replace(
        gpu_steps.DEMO_SHAPE, attention=attention, num_layers=1, hidden_size=32, intermediate_size=48, vocab_size=60
    )
    sizes = {"batch_sizes": (1, 3), "context_len": 5, "repeats": 1}
    kernels = TritonKernels.create(DEVICE)
    steps = list(gpu.report_steps(kernels, DEVICE, shape, torch.float16, **sizes))
    assert [(step["batch_size"], step["context_len"]) for step in steps] == [(1, 5), (3, 5)]
    for step in steps:
        assert step["is_right"]
        assert step["saved_share"] == 1 - step["graph_ms"] / step["eager_ms"]
    assert "WRONG" not in capsys.readouterr().out
    right = PaddedDecodes.run
    monkeypatch.setattr(PaddedDecodes, "run", lambda self, step: right(self, step) * 1.1)
    sizes["batch_sizes"] = (1,)
    assert not any(step["is_right"] for step in gpu.report_steps(kernels, DEVICE, shape, torch.float16, **sizes))
    assert "WRONG by 1.0e-01" in capsys.readouterr().out


def test_checks_cover_every_feature_in_both_dtypes() -> None:
    checked = list(gpu.cases())
    for dtype in (torch.float16, torch.bfloat16):
        assert set(gpu.FEATURES) <= {case.name for case in checked if case.dtype == dtype}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_2() -> None:
    command = [sys.executable, gpu.__file__]
    run = subprocess.run(
        command, env={**os.environ, "PYTHONSAFEPATH": "1"}, capture_output=True, text=True, check=False, cwd=Path.home()
    )
    assert run.returncode == 2
    assert "no GPU" in run.stderr
