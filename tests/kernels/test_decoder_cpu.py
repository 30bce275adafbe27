"""The decoder kernels in C: the suite for each instruction set, and what holds on a CPU alone."""

from __future__ import annotations

import platform

import pytest
import torch

from pagedkv.kernels.cpu import decoder as cpu_decoder
from pagedkv.kernels.cpu.compiler import CompilerError
from pagedkv.kernels.cpu.decoder import CpuDecoderKernels
from pagedkv.plugin.conformance import decoder as suite
from pagedkv.plugin.conformance.decoder import CASES, DecoderConformance, make_batch, make_shape, make_weights
from pagedkv.plugin.decoder import Decoder
from pagedkv.plugin.interface import ModelInput

CPU = torch.device("cpu")
IS_X86 = platform.machine() == "x86_64"


class TestNative(DecoderConformance):
    def make_kernels(self) -> CpuDecoderKernels:
        return CpuDecoderKernels.create(CPU)


class TestPortable(DecoderConformance):
    def make_kernels(self) -> CpuDecoderKernels:
        return CpuDecoderKernels(CPU, ("-march=x86-64",) if IS_X86 else ("-DLANES=4",))


@pytest.mark.skipif(not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="this CPU has no AVX2")
class TestAvx2(DecoderConformance):
    def make_kernels(self) -> CpuDecoderKernels:
        return CpuDecoderKernels(CPU, ("-march=haswell",))


def build(dtype: torch.dtype = torch.bfloat16) -> Decoder:
    weights = make_weights(CASES[1], dtype)
    return CpuDecoderKernels.create(CPU).build(suite._taken(weights))


class SelfAttention:
    """Every token sees itself alone, so that no row has to do with another."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: object) -> torch.Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gives_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    decoder = build(dtype)
    batch = make_batch(CASES[1].shape, 300)
    whole = decoder.forward(ModelInput(batch.token_ids, batch.positions, torch.arange(300)), SelfAttention()).clone()
    for first, last in ((0, 1), (5, 7), (40, 71), (100, 299)):
        part = ModelInput(batch.token_ids[first:last], batch.positions[first:last], torch.arange(last - first))
        assert torch.equal(decoder.forward(part, SelfAttention()), whole[first:last])


def test_tokens_that_are_a_column_of_a_matrix_are_read_as_such() -> None:
    decoder, batch = build(), make_batch(CASES[1].shape, 20)
    token_ids, positions = (torch.stack([x, x * 0], 1)[:, 0] for x in (batch.token_ids, batch.positions))
    columns = ModelInput(token_ids, positions, batch.logit_rows)
    assert not columns.token_ids.is_contiguous()
    assert torch.equal(decoder.forward(columns, SelfAttention()), decoder.forward(batch, SelfAttention()))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(num_threads: int) -> None:
    decoder, batch = build(), make_batch(CASES[1].shape, 250)
    before, expected = torch.get_num_threads(), decoder.forward(batch, SelfAttention()).clone()
    try:
        torch.set_num_threads(num_threads)
        assert torch.equal(decoder.forward(batch, SelfAttention()), expected)
        single = ModelInput(batch.token_ids[-1:], batch.positions[-1:], torch.zeros(1, dtype=torch.int64))
        assert torch.equal(decoder.forward(single, SelfAttention()), expected[:1])
    finally:
        torch.set_num_threads(before)


def test_what_it_does_not_serve_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = CpuDecoderKernels.create(CPU)
    assert kernels.unsupported_reasons(make_shape(), torch.float16) == ["weights of torch.float16 are not implemented"]
    assert kernels.unsupported_reasons(make_shape(hidden=63), torch.float32)
    on_gpu = CpuDecoderKernels.create(torch.device("cuda")).unsupported_reasons(make_shape(), torch.float32)
    assert on_gpu == ["it needs a CPU, the device is cuda"]

    def fail(*_: object) -> None:
        raise CompilerError("no C compiler found")

    monkeypatch.setattr(cpu_decoder, "load_library", fail)
    assert kernels.unsupported_reasons(make_shape(), torch.float32) == ["no C compiler found"]
