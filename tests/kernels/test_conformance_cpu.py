"""The cpu kernels do what every kernel provider must, in every width of vectors that their source is compiled to."""

import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from pagedkv.kernels.cpu.attention_choice import AttentionChoice
from pagedkv.kernels.cpu.library import TileUse
from pagedkv.kernels.cpu.provider import CpuKernels
from pagedkv.plugin.conformance.kernels import REDUCED, KernelsConformance
from pagedkv.plugin.interface import AttentionKernels

CPU_FLAGS = re.search(r"^flags.*$|\Z", Path("/proc/cpuinfo").read_text(), re.MULTILINE).group().split()


class TestCpuKernels(KernelsConformance):
    kernels_name = "cpu"


class _OtherBuild(KernelsConformance):
    """The same source with other flags."""

    pytestmark = pytest.mark.slow
    kernels_name = "cpu"
    profile = REDUCED
    compiler_flags: ClassVar[tuple[str, ...]]

    @pytest.fixture
    def kernels(self) -> AttentionKernels:
        return CpuKernels(torch.device("cpu"), self.compiler_flags)


class TestPortableVectors(_OtherBuild):
    """Four lanes and no instruction beyond the architecture's first ones."""

    compiler_flags = ("-march=x86-64",)


# What follows is built where the CPU's own build, which `TestCpuKernels` runs, is another one.
if "avx512f" in CPU_FLAGS:

    class TestAvx2(_OtherBuild):
        """Eight lanes."""

        compiler_flags = ("-march=x86-64-v3",)

else:

    class TestWideVectors(_OtherBuild):
        """Sixteen lanes, as with AVX-512; the compiler splits them where the CPU has narrower ones."""

        compiler_flags = ("-DLANES=16",)


if "avx512_bf16" in CPU_FLAGS:

    class TestAvx512(_OtherBuild):
        """Sixteen lanes and no dot product of pairs of bf16, nor of integers: the first processors with AVX-512."""

        dtypes = (torch.bfloat16,)
        compiler_flags = ("-march=skylake-avx512",)

else:

    class TestPairsOfBf16(_OtherBuild):
        """The flow for AVX-512-BF16, whose dot product of pairs is written out where the CPU lacks it."""

        dtypes = (torch.bfloat16,)
        compiler_flags = ("-DLANES=16", "-DHAS_BF16_DOT=1")


class TestTiles(_OtherBuild):
    """Every product of bf16 made by tiles, by the software version where the CPU has none."""

    dtypes = (torch.bfloat16,)
    compiler_flags = (
        *(() if "amx_bf16" in CPU_FLAGS else ("-DSOFTWARE_TILES",)),
        *(() if "avx512_bf16" in CPU_FLAGS else ("-DLANES=16", "-DHAS_BF16_DOT=1")),
    )

    @pytest.fixture
    def kernels(self) -> AttentionKernels:
        return CpuKernels(torch.device("cpu"), self.compiler_flags, AttentionChoice(TileUse.DECODES | TileUse.PROMPTS))
