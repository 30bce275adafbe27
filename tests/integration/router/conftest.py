"""A tiny model with a tiny tokenizer, and servers of it as processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from pagedkv.integration.serve.child_process import ChildServer, child_server

from .tiny_tokenizer import EOS_ID, make_tokenizer, save_tokenizer

MAX_POSITION_TOKENS = 4096


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Tokenizer) -> Path:
    """Two layers, 4 query and 2 KV heads, which two shards divide; float32, random weights whose best tokens are far
    apart."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tiny_tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITION_TOKENS,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        initializer_range=0.5,
    )
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    LlamaForCausalLM(config).save_pretrained(directory)
    save_tokenizer(tiny_tokenizer, directory)
    return directory


ServeTiny = Callable[..., object]


@pytest.fixture(scope="session")
def serve_tiny(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> ServeTiny:
    """`with serve_tiny("key=value", …, num_shards=2) as server`: a process (or two) that serves the tiny Llama."""

    @contextmanager
    def serve(*settings: str, num_shards: int = 1) -> Iterator[ChildServer]:
        folder = tmp_path_factory.mktemp("server")
        arguments = [str(tiny_llama), "--uds-path", str(folder / "socket"), "--set", "model.device=cpu"]
        arguments += ["--num-shards", str(num_shards)] if num_shards > 1 else []
        arguments += [part for setting in settings for part in ("--set", setting)]
        environ = {"OMP_NUM_THREADS": "1", "PAGEDKV_METRICS_LISTEN": "127.0.0.1:0", "PYTHONFAULTHANDLER": "1"}
        with child_server(arguments, folder / "log", environ=environ) as server:
            yield server

    return serve
