"""The reference kernels do what every kernel provider must."""

from pagedkv.plugin.conformance.kernels import KernelsConformance


class TestReferenceKernels(KernelsConformance):
    kernels_name = "reference"
