"""The cpu kernels do what every kernel provider must, in every width of vectors that their source is compiled to."""

from typing import ClassVar

import pytest
import torch

from pagedkv.kernels.cpu.provider import CpuKernels
from pagedkv.plugin.conformance.kernels import REDUCED, KernelsConformance
from pagedkv.plugin.interface import AttentionKernels


class TestCpuKernels(KernelsConformance):
    kernels_name = "cpu"


class _OtherBuild(KernelsConformance):
    """The same source with other flags, all of which run on any x86-64."""

    kernels_name = "cpu"
    profile = REDUCED
    compiler_flags: ClassVar[tuple[str, ...]]

    @pytest.fixture
    def kernels(self) -> AttentionKernels:
        return CpuKernels(torch.device("cpu"), self.compiler_flags)


class TestPortableVectors(_OtherBuild):
    """Four lanes and no instruction beyond the architecture's first ones."""

    compiler_flags = ("-march=x86-64",)


class TestWideVectors(_OtherBuild):
    """Sixteen lanes, as with AVX-512; the compiler splits them where the CPU has narrower ones."""

    compiler_flags = ("-DLANES=16",)


class TestPairsOfBf16(_OtherBuild):
    """The flow for AVX-512-BF16, whose dot product of pairs is written out where the CPU lacks it."""

    dtypes = (torch.bfloat16,)
    compiler_flags = ("-DLANES=16", "-DHAS_BF16_DOT=1")
