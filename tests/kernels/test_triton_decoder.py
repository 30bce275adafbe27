"""The triton decoder kernels: the suite, on a GPU whole and in triton's interpreter with few tokens.

Without a GPU these tests are run by `test_triton_interpreter.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from pagedkv.kernels.triton.decoder import TritonDecoderKernels
from pagedkv.kernels.triton.launch import is_interpreted
from pagedkv.plugin.conformance.decoder import CASES, Case, DecoderConformance, make_shape

pytestmark = pytest.mark.skipif(
    not is_interpreted() and not torch.cuda.is_available(),
    reason="run by test_triton_interpreter.py, in a process of its own",
)
DEVICE = torch.device("cpu") if is_interpreted() else torch.device("cuda", 0)


class TestTritonDecoder(DecoderConformance):
    dtypes = (torch.float32,) if is_interpreted() else (torch.float32, torch.bfloat16, torch.float16)
    device = str(DEVICE)

    def make_kernels(self) -> TritonDecoderKernels:
        return TritonDecoderKernels.create(DEVICE)

    @pytest.mark.parametrize("num_tokens", [1, 5] if is_interpreted() else [1, 7, 200])
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_logits_are_those_of_the_formula(self, case: Case, num_tokens: int) -> None:
        super().test_logits_are_those_of_the_formula(case, num_tokens)

    @pytest.mark.parametrize("rotated_share", [0.0, 0.5])
    def test_heads_with_norms_of_which_not_all_channels_turn(self, rotated_share: float) -> None:
        case = replace(CASES[3], has_head_norms=True, rotated_share=rotated_share)
        super().test_logits_are_those_of_the_formula(case, 3)


def test_what_it_does_not_serve_is_said() -> None:
    kernels = TritonDecoderKernels.create(DEVICE)
    assert kernels.unsupported_reasons(make_shape(), torch.float64) == ["weights of torch.float64 are not implemented"]
    assert kernels.unsupported_reasons(make_shape(hidden=20000), torch.float32)
    narrow = replace(make_shape().attention, v_head_dim=8)
    assert kernels.unsupported_reasons(make_shape(attention=narrow), torch.float32)


@pytest.mark.skipif(is_interpreted(), reason="the interpreter has no graphs")
def test_a_captured_step_gives_the_logits_of_another_batch() -> None:
    from pagedkv.plugin.conformance.decoder import BatchAttention, _taken, make_batch, make_weights

    weights = make_weights(CASES[0], torch.float32, str(DEVICE))
    decoder = TritonDecoderKernels.create(DEVICE).build(_taken(weights))
    batch, other = make_batch(CASES[0].shape, 8, str(DEVICE)), make_batch(CASES[0].shape, 8, str(DEVICE))
    other.token_ids.add_(7).remainder_(100)
    decoder.forward(batch, BatchAttention())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = decoder.forward(batch, BatchAttention())
    batch.token_ids.copy_(other.token_ids)
    graph.replay()
    torch.testing.assert_close(logits, decoder.forward(other, BatchAttention()))
