"""The `auto` decoder kernels: pick the decoder kernels for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from pagedkv.plugin.config import PluginTables
from pagedkv.plugin.decoder import Decoder, DecoderKernels, DecoderShape, DecoderWeights
from pagedkv.plugin.errors import PagedKVError
from pagedkv.plugin.features import INTERFACE_VERSION, InterfaceVersion, understood_features
from pagedkv.plugin.registry import DECODERS, create_plugin

if TYPE_CHECKING:
    from typing_extensions import Self

CANDIDATES = {"cuda": "triton", "cpu": "cpu"}
"""Names of plugins by type of device."""


class AutoDecoderKernels:
    """Implements `DecoderKernels` with the kernels for the device."""

    interface_version: ClassVar[InterfaceVersion] = INTERFACE_VERSION

    def __init__(self, device: torch.device, kernels: DecoderKernels | None, reason: str = "") -> None:
        self._device = device
        self._kernels = kernels
        self._reason = reason

    @classmethod
    def create(cls, device: torch.device, plugins: PluginTables | None = None) -> Self:
        name = CANDIDATES.get(device.type)
        if name is None:
            return cls(device, None, f"no decoder kernels are made for {device.type}")
        try:
            return cls(device, create_plugin(DECODERS, name, plugins or {}, device))
        except PagedKVError as error:
            return cls(device, None, str(error))

    @property
    def name(self) -> str:
        return self._kernels.name if self._kernels else "auto"

    @property
    def features(self) -> frozenset[str]:
        return understood_features(self._kernels)

    def unsupported_reasons(self, shape: DecoderShape, dtype: torch.dtype) -> list[str]:
        return self._kernels.unsupported_reasons(shape, dtype) if self._kernels else [self._reason]

    def build(self, weights: DecoderWeights) -> Decoder:
        assert self._kernels, self._reason
        return self._kernels.build(weights)
