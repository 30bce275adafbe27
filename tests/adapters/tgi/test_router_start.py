"""What both backends tell is what a router of text-generation-inference starts with, whatever its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.adapters.tgi.convert import to_info, to_limits, to_warmup_response
from pagedkv.adapters.transformers.paged_model import TransformersModel
from pagedkv.plugin.config import parse_config
from pagedkv.plugin.conformance.backend import make_request, run
from pagedkv.plugin.errors import CapacityError
from pagedkv.plugin.interface import Backend, Capacity
from pagedkv.plugin.registry import BACKENDS, load_plugin
from pagedkv.plugin.resolved_config import resolve_config, resolve_model_settings

MAX_PREFILL_TOKENS = 4096
"""What the launcher passes where nothing else is said."""

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that was made for 8192 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
    )
    directory = tmp_path_factory.mktemp("models") / "llama"
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def make_backend(checkpoint: Path, name: str, **cache: Any) -> Backend:
    sections = {"path": str(checkpoint), "dtype": "float32", "device": "cpu"}
    config = parse_config({"backend": name, "model": sections, "cache": cache})
    resolved = resolve_config(config, TransformersModel.describe(resolve_model_settings(config)))
    return load_plugin(BACKENDS, name).create(resolved)


def warm_up(
    backend: Backend, request: pb.WarmupRequest, has_chunked_prefill: bool = True
) -> tuple[pb.InfoResponse, pb.WarmupResponse, Capacity]:
    info = to_info(backend.info, has_chunked_prefill)
    capacity = backend.warmup(to_limits(request, info.support_chunking))
    return info, to_warmup_response(request, capacity, backend.info), capacity


def check_router_starts(info: pb.InfoResponse, request: pb.WarmupRequest, answer: pb.WarmupResponse) -> None:
    """The router ends at start unless all of this holds, and stops serving unless its longest request fits."""
    for length in ("max_input_tokens", "max_total_tokens"):
        assert not request.HasField(length) or getattr(request, length) == getattr(answer, length)
    assert 1 <= answer.max_input_tokens < answer.max_total_tokens
    assert info.support_chunking or answer.max_input_tokens <= request.max_prefill_tokens
    assert not info.HasField("window_size"), "it would count no token beyond the window"
    assert answer.HasField("max_supported_total_tokens") != info.requires_padding
    if info.requires_padding:
        return
    assert answer.max_total_tokens <= answer.max_supported_total_tokens
    assert request.max_prefill_tokens <= answer.max_supported_total_tokens
    num_free_blocks = answer.max_supported_total_tokens // info.block_size - 1
    assert -(-(answer.max_total_tokens - 1) // info.block_size) <= num_free_blocks


POOLS = [{"num_blocks": 1}, {"num_blocks": 40}, {"num_blocks": 1000}, {"num_blocks": 40, "overcommit": 3.0}]
FLAGS = [{}, {"max_input_tokens": 10}, {"max_total_tokens": 16}, {"max_input_tokens": 15, "max_total_tokens": 16}]


@pytest.mark.parametrize("name", ["paged", "contiguous"])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_the_router_starts(checkpoint: Path, name: str, pool: dict[str, Any], flags: dict[str, int]) -> None:
    backend = make_backend(checkpoint, name, **pool)
    request = pb.WarmupRequest(max_prefill_tokens=MAX_PREFILL_TOKENS, **flags)
    for has_chunked_prefill in (True, False):
        info, answer, _ = warm_up(backend, request, has_chunked_prefill)
        check_router_starts(info, request, answer)
    backend.close()


@pytest.mark.parametrize("name", ["paged", "contiguous"])
def test_a_request_of_all_tokens_told_runs_in_a_cache_of_no_more(checkpoint: Path, name: str) -> None:
    backend = make_backend(checkpoint, name, num_blocks=4)
    request = pb.WarmupRequest(max_prefill_tokens=MAX_PREFILL_TOKENS)
    info, answer, capacity = warm_up(backend, request)
    check_router_starts(info, request, answer)
    assert answer.max_total_tokens == capacity.max_total_tokens == 4 * BLOCK_SIZE
    for num_prompt_tokens in (1, answer.max_input_tokens):
        num_new_tokens = answer.max_total_tokens - num_prompt_tokens
        outputs = run(backend, [make_request(0, [5] * num_prompt_tokens, max_new_tokens=num_new_tokens)])
        assert len(outputs[0]) == num_new_tokens
    backend.close()


@pytest.mark.parametrize("name", ["paged", "contiguous"])
@pytest.mark.parametrize("flags", [{"max_input_tokens": 64}, {"max_total_tokens": 65}, {"max_total_tokens": 8193}])
def test_lengths_that_the_cache_or_the_model_can_not_keep_are_refused(
    checkpoint: Path, name: str, flags: dict[str, int]
) -> None:
    backend = make_backend(checkpoint, name, num_blocks=4)
    with pytest.raises(CapacityError):
        warm_up(backend, pb.WarmupRequest(max_prefill_tokens=MAX_PREFILL_TOKENS, **flags))
    backend.close()


def test_the_contiguous_backend_tells_no_longer_prompt_than_one_prefill(checkpoint: Path) -> None:
    backend = make_backend(checkpoint, "contiguous", num_blocks=1024)
    request = pb.WarmupRequest(max_prefill_tokens=MAX_PREFILL_TOKENS)
    info, answer, _ = warm_up(backend, request)
    check_router_starts(info, request, answer)
    assert (answer.max_input_tokens, answer.max_total_tokens) == (MAX_PREFILL_TOKENS, 8192)
    backend.close()
