"""Memory and utilization of the server's GPU, from NVML."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from pagedkv.integration.serve.metrics.catalogue import GPU_MEMORY_TOTAL, GPU_MEMORY_USED, GPU_UTILIZATION

logger = logging.getLogger(__name__)


class NvmlReader:
    """Reads the metrics of one GPU by its UUID. Index numbers of NVML and CUDA differ if CUDA_VISIBLE_DEVICES is set.

    Args:
        nvml: the module pynvml.
        uuid: of the GPU, in NVML's form, with the prefix "GPU-".
    """

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._name = str(nvml.nvmlDeviceGetIndex(self._handle))

    def read(self) -> Mapping[str, Mapping[str, float]]:
        """Returns values by metric and GPU; empty while NVML reports errors."""
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
            percent = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
        except self._nvml.NVMLError as error:
            logger.debug("NVML can't tell: %s", error)
            return {}
        return {
            GPU_MEMORY_USED.name: {self._name: float(memory.used)},
            GPU_MEMORY_TOTAL.name: {self._name: float(memory.total)},
            GPU_UTILIZATION.name: {self._name: percent / 100},
        }


def make_gpu_reader(device: torch.device) -> NvmlReader | None:
    """Makes a reader for the GPU of a backend; None on a CPU, or if NVML is not installed or does not work."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        logger.info("no GPU metrics: nvidia-ml-py is not installed")
        return None
    try:
        pynvml.nvmlInit()
        return NvmlReader(pynvml, f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError as error:
        logger.info("no GPU metrics: %s", error)
        return None
