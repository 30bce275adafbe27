"""Tenants that trusted infrastructure names in a call's metadata can't find out what others have asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.plugin.backend.paged import PagedBackend
from pagedkv.plugin.config import load_config, parse_config
from pagedkv.plugin.conformance.token_model import TokenModel
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.registry import KERNELS, load_plugin
from pagedkv.plugin.resolved_config import resolve_config

KEY = "x-tenant"
PROMPT = "A prompt of more than one block, so that its beginning can be found again."


@pytest.fixture
def paged_backend() -> PagedBackend:
    model = TokenModel(vocab_size=258)
    keys = {"model.path": "none", "cache.num_blocks": 64, "limits.max_total_tokens": 256}
    config = resolve_config(load_config(None, keys, {}), model.spec)
    return PagedBackend(config, model, load_plugin(KERNELS, "reference").create(torch.device("cpu")))


@pytest.fixture
def cached_tokens(
    serving: Callable[..., Any], make_tokenizer: Any, paged_backend: PagedBackend, tmp_path: Path
) -> Callable[..., list[int]]:
    """How many prompt tokens each of some calls found in the cache, sent one after another with this metadata."""

    def count(*metadata: tuple[tuple[str, str], ...], key: str = KEY) -> list[int]:
        found = []
        with serving(paged_backend, make_tokenizer(), tmp_path, cache_salt_metadata_key=key) as served:
            for request_id, entries in enumerate(metadata):
                batch = pb.Batch(id=1, requests=[served.wire.request(request_id, PROMPT, 1)])
                before = paged_backend.stats().prefix_cache_hit_tokens
                _, call = served.wire.stub.Prefill.with_call(pb.PrefillRequest(batch=batch), metadata=entries)
                found.append(paged_backend.stats().prefix_cache_hit_tokens - before)
                told = [value for name, value in call.trailing_metadata() if name == "pagedkv-cached-tokens"]
                assert told == ([] if key else [f"{request_id}={found[-1]}"]), "a tenant is told nothing of the cache"
        return found

    return count


NUM_FINDABLE_TOKENS = (len(PROMPT) - 1) // 16 * 16


def test_a_tenant_finds_its_own_prompts_and_no_other_s(cached_tokens):
    a, b = ((KEY, "a"),), ((KEY, "b"),)
    assert cached_tokens(a, b, a, b) == [0, 0, NUM_FINDABLE_TOKENS, NUM_FINDABLE_TOKENS]


def test_prompts_of_calls_without_a_tenant_are_private(cached_tokens):
    assert cached_tokens(((KEY, "a"),), (), (), ((KEY, ""),), ((KEY, ""),)) == [0] * 5


def test_prompts_of_one_call_without_a_tenant_are_private_too(serving, make_tokenizer, paged_backend, tmp_path):
    with serving(paged_backend, make_tokenizer(), tmp_path, cache_salt_metadata_key=KEY) as served:
        running = served.wire.prefill(1, served.wire.request(1, PROMPT, 2), served.wire.request(2, PROMPT, 2))
        served.wire.finish(running)
    assert paged_backend.stats().prefix_cache_hit_tokens == 0


def test_the_count_of_cached_tokens_can_be_kept_from_clients(serving, make_tokenizer, backend, tmp_path):
    for told in (True, False):
        with serving(backend, make_tokenizer(), tmp_path, cached_tokens_trailer=told) as served:
            batch = pb.Batch(id=1, requests=[served.wire.request(1, PROMPT, 1)])
            _, call = served.wire.stub.Prefill.with_call(pb.PrefillRequest(batch=batch))
            assert bool([key for key, _ in call.trailing_metadata() if key == "pagedkv-cached-tokens"]) == told


def test_metadata_is_not_looked_at_unless_the_config_names_a_key(cached_tokens):
    assert cached_tokens(((KEY, "a"),), ((KEY, "b"),), key="") == [0, NUM_FINDABLE_TOKENS]


def test_a_call_that_names_two_tenants_is_refused(backend, serving, make_tokenizer, tmp_path):
    with serving(backend, make_tokenizer(), tmp_path, cache_salt_metadata_key=KEY) as salted:
        batch = pb.Batch(id=1, requests=[salted.wire.request(1, "a")])
        code, details = salted.wire.refused(
            lambda: salted.wire.stub.Prefill(pb.PrefillRequest(batch=batch), metadata=((KEY, "a"), (KEY, "b")))
        )
    assert code.name == "INVALID_ARGUMENT"
    assert KEY in details


@pytest.mark.parametrize("key", ["X-Tenant", "grpc-tenant", "tenant-bin", "a tenant"])
def test_a_key_that_metadata_can_not_have_is_refused(key):
    with pytest.raises(ConfigError, match="a key of gRPC metadata"):
        parse_config({"server": {"cache_salt_metadata_key": key}})
