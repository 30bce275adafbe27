"""The cpu kernels do what every kernel provider must."""

from pagedkv.plugin.conformance.kernels import KernelsConformance


class TestCpuKernels(KernelsConformance):
    kernels_name = "cpu"
