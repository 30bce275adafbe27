"""The reference kernels do what every kernel provider must."""

from dataclasses import replace

from pagedkv.plugin.conformance.kernels import FULL, KernelsConformance


class TestReferenceKernels(KernelsConformance):
    kernels_name = "reference"
    profile = replace(FULL, max_context_tokens=1000, num_random_batches=15)
