"""Tiny models, alone and split over shards: what they generate, and how many bytes of KV each shard holds, as JSON.

    python shard_outputs.py FOLDER_FOR_MODELS DIRECTORY_OF_SMOLLM2

A script of its own because its processes are forked.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from pagedkv.adapters.transformers.contiguous_backend import ContiguousBackend
from pagedkv.adapters.transformers.paged_model import TransformersModel
from pagedkv.integration.measure.plan.model_facts import read_model
from pagedkv.integration.measure.plan.weights import count_weight_bytes
from pagedkv.plugin.backend.paged import PagedBackend
from pagedkv.plugin.config import parse_config
from pagedkv.plugin.conformance.shards import run_shards
from pagedkv.plugin.errors import UnsupportedError
from pagedkv.plugin.interface import Backend, WarmupLimits
from pagedkv.plugin.requests import Request, RequestId, SamplingParams
from pagedkv.plugin.resolved_config import ResolvedConfig, resolve_config, resolve_model_settings

NUM_PROMPTS = 40
NUM_NEW_TOKENS = 16


def make_model(folder: Path, num_heads: int, num_kv_heads: int) -> Path:
    path = folder / f"{num_heads}-{num_kv_heads}"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=8 * num_heads,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        intermediate_size=90,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    model.save_pretrained(path)
    return path


def make_backend(path: Path) -> PagedBackend:
    config = parse_config(
        {
            "model": {"path": str(path), "device": "cpu", "dtype": "float32", "decoder": "off"},
            "cache": {"block_size": 8, "num_blocks": 40},
            "scheduler": {"max_step_tokens": 48},
            "kernels": {"name": "reference"},
        }
    )
    backend = PagedBackend.create(resolve_config(config, TransformersModel.describe(resolve_model_settings(config))))
    backend.warmup(WarmupLimits())
    return backend


def make_requests(num_prompts: int) -> list[Request]:
    """Every other one begins with the same 24 tokens; some are longer than a step."""
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    requests = []
    for index in range(num_prompts):
        num_tokens = 60 if index % 8 == 7 else 4 + index % 8
        tail = torch.randint(3, 256, (num_tokens,), generator=generator).tolist()
        shared = list(range(100, 124)) if index % 2 else []
        requests.append(Request(RequestId(index), shared + tail, params))
    return requests


def generate(path: Path, num_prompts: int = NUM_PROMPTS) -> dict[str, Any]:
    backend = make_backend(path)
    backend.add(make_requests(num_prompts))
    tokens: dict[int, list[int]] = {}
    while backend.has_unfinished():
        for output in backend.step():
            tokens.setdefault(int(output.request_id), []).append(output.token.token_id)
    backend.check_integrity()
    stats = dict(backend.stats())
    kv_bytes = sum(storage.num_bytes for storage in backend._executor._storage)
    weight_bytes = sum(tensor.nbytes for tensor in map(_local, backend._model._model.parameters()))
    weight_bytes += sum(buffer.nbytes for buffer in backend._model._model.buffers())
    num_kv_heads = {layer.num_kv_heads for layer in backend.info.model.layers}
    backend.close()
    return {
        "tokens": [tokens[index] for index in range(num_prompts)],
        "stats": stats,
        "kv_bytes": kv_bytes,
        "weight_bytes": weight_bytes,
        "num_kv_heads": sorted(num_kv_heads),
    }


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def plan_weights(path: Path, num_shards: int) -> int | None:
    facts = read_model(parse_config({"model": {"path": str(path)}}))
    return count_weight_bytes(facts, torch.float32, num_shards)


def refuse(path: Path) -> list[str]:
    """What each backend says to a split of SmolLM2 into two."""
    config = parse_config({"model": {"path": str(path), "device": "cpu", "dtype": "float32"}})
    resolved = resolve_config(config, TransformersModel.describe(resolve_model_settings(config)))
    return [_reason(backend, resolved) for backend in (PagedBackend, ContiguousBackend)]


def _reason(backend: type[Backend], config: ResolvedConfig) -> str:
    try:
        backend.create(config)
    except UnsupportedError as error:
        return str(error)
    return ""


def main(folder: Path, smollm2: Path) -> None:
    torch.set_num_threads(1)
    halves, shared, thirds = make_model(folder, 8, 4), make_model(folder, 4, 2), make_model(folder, 9, 3)
    split: dict[str, Any] = {
        "halves": run_shards(lambda group: generate(halves)),
        "shared": run_shards(lambda group: generate(shared, 4), num_shards=4),
        "thirds": run_shards(lambda group: generate(thirds, 4), num_shards=3),
        "refused": run_shards(lambda group: refuse(smollm2)),
    }
    alone = {"halves": generate(halves), "shared": generate(shared, 4), "thirds": generate(thirds, 4)}
    shards = {name: [asdict(outcome) for outcome in outcomes] for name, outcomes in split.items()}
    planned = {
        name: plan_weights(path, len(split[name]))
        for name, path in (("halves", halves), ("shared", shared), ("thirds", thirds))
    }
    json.dump({"alone": alone, "shards": shards, "planned": planned}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
