"""Measures the peak bytes of live tensors while code runs, in real memory or on the meta device.

On the meta device tensors have a size but no content, so the engine's own step runs for a model of any size. Code that
needs content there (a token id to return, which experts are used) gets zeros, or the most there could be.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations create, until they are freed. Earlier tensors are not counted.

    Memory that an operation allocates and frees internally (a library's workspace) is not counted.
    """

    def __init__(self, device_type: str) -> None:
        """Makes a counter of tensors on this device type only."""
        super().__init__()
        self._device_type = device_type
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.num_bytes = 0
        self.peak_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        for tensor in self._tensors((args, kwargs)):
            self._note(tensor, is_new=False)
        stand_in = _CONTENT_OF_META.get(func)
        output = stand_in(func, args, kwargs) if stand_in else func(*args, **kwargs)
        for tensor in self._tensors(output):
            self._note(tensor, is_new=True)
        return output

    def _tensors(self, values: Any) -> Iterator[torch.Tensor]:
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device_type:
                yield leaf

    def _note(self, tensor: torch.Tensor, *, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        num_bytes = storage.nbytes() if is_new else 0
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

        def forget(_: Any) -> None:
            del self._known[key]
            self.num_bytes -= num_bytes

        self._known[key] = weakref.ref(storage, forget)


def _is_composite(func: Any) -> bool:
    """Whether an operation is composite. In inference mode these are dispatched whole, with temporaries inside."""
    return func not in _CONTENT_OF_META and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    )


def _is_meta(args: tuple[Any, ...]) -> bool:
    return isinstance(args[0], torch.Tensor) and args[0].is_meta


def _copy_to_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    if _is_meta(args) and device is not None and torch.device(device).type == "cpu":
        return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    return func(*args, **kwargs)


def _zero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return torch.zeros((), dtype=args[0].dtype).item() if _is_meta(args) else func(*args, **kwargs)


def _nonzero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _is_meta(args):
        return func(*args, **kwargs)
    return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device="meta")


def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indexing on the meta device: a mask selects everything."""
    if not _is_meta(args):
        return func(*args, **kwargs)
    indices: list[torch.Tensor | None] = []
    for index in args[1]:
        if index is None or index.dtype is not torch.bool:
            indices.append(index)
        else:
            indices += [torch.empty(index.numel(), dtype=torch.int64, device="meta")] * index.dim()
    return func(args[0], indices)


def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the tensor itself for `pin_memory`, which needs a GPU, and is called for all devices except CPUs."""
    return func(*args, **kwargs) if torch.cuda.is_available() else args[0]


_CONTENT_OF_META: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    _aten._to_copy.default: _copy_to_host,
    _aten._local_scalar_dense.default: _zero,
    _aten.nonzero.default: _nonzero,
    _aten.index.Tensor: _index,
    _aten.pin_memory.default: _same,
    _aten._pin_memory.default: _same,
}
