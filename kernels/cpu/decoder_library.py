"""Python bindings (ctypes) of the C functions in csrc/decoder; structures are those of decoder.c."""

from __future__ import annotations

import ctypes

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class LinearArgs(ctypes.Structure):
    """A packed projection."""

    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("num_panels", _INT64), ("depth", _INT64))

    num_panels: int
    depth: int

    def num_columns(self, panel: int) -> int:
        """Number of columns, including the padding of the last panel."""
        return self.num_panels * panel


class LayerArgs(ctypes.Structure):
    _fields_ = (
        ("input_norm", _POINTER),
        ("feed_forward_norm", _POINTER),
        ("attention_output_norm", _POINTER),
        ("feed_forward_output_norm", _POINTER),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("qkv", LinearArgs),
        ("attention_output", LinearArgs),
        ("gate_up", LinearArgs),
        ("down", LinearArgs),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("num_rotated_pairs", _INT64),
        ("num_heads", _INT64),
        ("num_kv_heads", _INT64),
        ("head_dim", _INT64),
    )

    qkv: LinearArgs
    down: LinearArgs


class ModelArgs(ctypes.Structure):
    _fields_ = (
        ("embedding", _POINTER),
        ("final_norm", _POINTER),
        ("head", LinearArgs),
        ("hidden", _INT64),
        ("hidden_stride", _INT64),
        ("sums_width", _INT64),
        ("gated_width", _INT64),
        ("embedding_scale", _FLOAT),
        ("eps", _FLOAT),
        ("dtype", _INT32),
        ("activation", _INT32),
    )

    head: LinearArgs
    hidden_stride: int


class StepArgs(ctypes.Structure):
    _fields_ = (
        ("token_ids", _POINTER),
        ("positions", _POINTER),
        ("logit_rows", _POINTER),
        ("residual", _POINTER),
        ("qkv", _POINTER),
        ("attention", _POINTER),
        ("logits", _POINTER),
        ("last_residual", _POINTER),
        ("last_attention", _POINTER),
        ("scratch", _POINTER),
        ("num_tokens", _INT64),
        ("num_logit_rows", _INT64),
        ("num_threads", _INT32),
    )

    attention: int | None


class DecoderLibrary:
    """Calls the functions of a compiled library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        panel = library.pagedkv_decoder_panel
        panel.restype = _INT64
        self.panel: int = panel()
        self._scratch_bytes = library.pagedkv_decoder_scratch_bytes
        self._scratch_bytes.argtypes = (ctypes.POINTER(ModelArgs), _INT64, _INT32)
        self._scratch_bytes.restype = _INT64
        self._begin = library.pagedkv_decoder_begin
        self._layer = library.pagedkv_decoder_layer
        self._finish = library.pagedkv_decoder_finish
        model, step, layer = (ctypes.POINTER(kind) for kind in (ModelArgs, StepArgs, LayerArgs))
        self._begin.argtypes = self._finish.argtypes = (model, step, layer)
        self._layer.argtypes = (model, step, layer, layer)
        for function in (self._begin, self._layer, self._finish):
            function.restype = None

    def scratch_bytes(self, model: ModelArgs, num_rows: int, num_threads: int) -> int:
        """Bytes of scratch memory for a step over `num_rows` rows."""
        num_bytes: int = self._scratch_bytes(model, num_rows, num_threads)
        return num_bytes

    def begin(self, model: ModelArgs, step: StepArgs, first: LayerArgs) -> None:
        """Embeds the tokens and computes everything before the first attention."""
        self._begin(model, step, first)

    def layer(self, model: ModelArgs, step: StepArgs, layer: LayerArgs, following: LayerArgs) -> None:
        """Computes everything between one layer's attention and the next one's."""
        self._layer(model, step, layer, following)

    def finish(self, model: ModelArgs, step: StepArgs, last: LayerArgs) -> None:
        """Computes everything from the last attention to the logits."""
        self._finish(model, step, last)
