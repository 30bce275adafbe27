"""Packs weights into the panels that csrc/decoder/linear.h reads, and keeps their memory alive."""

from __future__ import annotations

import torch

from pagedkv.kernels.cpu.decoder_library import LinearArgs
from pagedkv.kernels.cpu.memory import allocate_zeros
from pagedkv.plugin.decoder import Projection


class Packer:
    """Packs weights for one library. `tensors` keeps all tensors alive whose addresses were returned."""

    def __init__(self, panel: int, dtype: torch.dtype) -> None:
        """Makes a packer. `panel` is the library's number of columns a panel; `dtype` is float32 or bfloat16."""
        self.panel = panel
        self.tensors: list[torch.Tensor] = []
        self._dtype = dtype
        self._kept: dict[int, int] = {}

    def round_up(self, num_columns: int) -> int:
        """Rounds up to whole panels."""
        return -(-num_columns // self.panel) * self.panel

    def round_up_gated(self, num_columns: int) -> int:
        """Rounds up to the gates of whole panels."""
        return self.round_up(2 * num_columns) // 2

    def keep(self, tensor: torch.Tensor) -> int:
        """Returns the address of a tensor, valid as long as the packer's `tensors`."""
        self.tensors.append(tensor)
        return tensor.data_ptr()

    def keep_floats(self, tensor: torch.Tensor | None) -> int | None:
        """Returns the address of a float32 copy; None for None. Copies a tensor that several layers share once."""
        if tensor is None:
            return None
        if id(tensor) not in self._kept:
            self.tensors.append(tensor)  # keep it alive, so that no other tensor gets its id
            self._kept[id(tensor)] = self.keep(tensor.detach().float().contiguous())
        return self._kept[id(tensor)]

    def pack_projection(self, projection: Projection, depth: int | None = None) -> LinearArgs:
        return self.pack(projection.weight, projection.bias, depth)

    def pack_gated(self, projection: Projection) -> LinearArgs:
        """Packs gates and ups into shared panels: the first half of a panel are gates, the second half their ups."""
        size = projection.weight.shape[0] // 2
        half = self.panel // 2
        index = torch.arange(self.round_up_gated(size)).view(-1, 1, half)
        # The index 2 × size is a column of zeros.
        rows = torch.cat([index, index + size], dim=1).where(index < size, 2 * size).flatten()
        weight = torch.cat([projection.weight.detach(), projection.weight.new_zeros(1, projection.weight.shape[1])])
        bias = None if projection.bias is None else torch.cat([projection.bias, projection.bias.new_zeros(1)])[rows]
        return self.pack(weight[rows], bias)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None, depth: int | None = None) -> LinearArgs:
        """Packs weight: [columns, in_features]. Pads with zeros to whole panels, and to `depth` steps of the sum."""
        columns, in_features = weight.shape
        depth = depth or in_features
        num_panels = self.round_up(columns) // self.panel
        # Nothing is touched before the threads copy, each its part: few rows are multiplied in the same parts.
        packed = allocate_zeros((num_panels * self.panel, depth), self._dtype, num_touched_bytes=0)
        packed[:columns, :in_features] = weight
        group = 2 if self._dtype == torch.bfloat16 else 1
        # Pack panel by panel, to avoid a second copy of the whole weight.
        target = packed.view(num_panels, depth // group, self.panel, group)
        for index in range(num_panels):
            rows = packed[index * self.panel : (index + 1) * self.panel].clone()
            target[index] = rows.view(self.panel, depth // group, group).transpose(0, 1)
        padded_bias = None
        if bias is not None:
            padded_bias = torch.zeros(num_panels * self.panel)
            padded_bias[:columns] = bias
        return LinearArgs(self.keep(packed), self.keep_floats(padded_bias), num_panels, depth)
