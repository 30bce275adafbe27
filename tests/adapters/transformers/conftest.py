"""Tiny random models of many architectures, saved as checkpoints, and a paged batch laid out by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.utils import logging as transformers_logging

from pagedkv.adapters.transformers.paged_model import TransformersModel
from pagedkv.plugin.attention_metadata import AttentionContext, AttentionMetadata
from pagedkv.plugin.config import Config, parse_config
from pagedkv.plugin.interface import ModelInput
from pagedkv.plugin.kv_dtypes import FP32
from pagedkv.plugin.registry import KERNELS, load_plugin
from pagedkv.plugin.resolved_config import ResolvedConfig, resolve_config, resolve_model_settings

VOCAB_SIZE = 96
BLOCK_SIZE = 8

BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NO_GQA = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, **IDS}

ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**BASE),
    "mistral": lambda: transformers.MistralConfig(**BASE, sliding_window=7),
    "qwen2": lambda: transformers.Qwen2Config(**BASE),
    "qwen3": lambda: transformers.Qwen3Config(**BASE, head_dim=16),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **BASE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **BASE, head_dim=16, query_pre_attn_scalar=16, sliding_window=6, attn_logit_softcapping=2.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **BASE, head_dim=16, sliding_window=6, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "smollm3": lambda: transformers.SmolLM3Config(**BASE, no_rope_layers=[1, 0, 1]),
    "phi3": lambda: transformers.Phi3Config(**BASE),
    "gpt2": lambda: transformers.GPT2Config(**GPT),
    "gptj": lambda: transformers.GPTJConfig(**GPT, rotary_dim=4),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**NO_GQA),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        word_embed_proj_dim=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        ffn_dim=48,
        max_position_embeddings=128,
        **IDS,
    ),
    "mixtral": lambda: transformers.MixtralConfig(**BASE, num_local_experts=4),
    "starcoder2": lambda: transformers.Starcoder2Config(**BASE, sliding_window=9),
    "cohere": lambda: transformers.CohereConfig(**BASE),
    "granite": lambda: transformers.GraniteConfig(**BASE, attention_multiplier=0.3),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **{**BASE, "num_hidden_layers": 4},
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**BASE, "num_key_value_heads": 4},
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
    ),
    "stablelm": lambda: transformers.StableLmConfig(**BASE),
    "falcon": lambda: transformers.FalconConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    ),
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4, max_position_embeddings=64
    ),
    "gpt_neo": lambda: transformers.GPTNeoConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64,
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **BASE,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "jamba": lambda: transformers.JambaConfig(**BASE, num_experts=2),
    "bert": lambda: transformers.BertConfig(**NO_GQA),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices on several threads are all waiting, the more so the busier the machine is."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def _quiet_transformers() -> Iterator[None]:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.set_verbosity(verbosity)
    transformers_logging.enable_progress_bar()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the checkpoint of a tiny random model, once a session: `tiny_model("llama")`."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            _random_model(ARCHITECTURES[name]()).save_pretrained(made[name])
        return made[name]

    return make


def _random_model(config: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # the small default weights would hide a wrong mask behind nearly uniform attention
            parameter.normal_(0, 0.25)
    return model


@pytest.fixture(scope="session")
def dense_model(tiny_model: Callable[[str], Path]) -> Callable[[str], Any]:
    """The same checkpoint as transformers itself runs it."""

    def load(name: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            tiny_model(name), dtype=torch.float32, attn_implementation="eager"
        ).eval()

    return load


def make_config(path: Path, **sections: Mapping[str, Any]) -> Config:
    model = {"path": str(path), "device": "cpu", "dtype": "float32", **sections.pop("model", {})}
    return parse_config({"model": model, **sections})


@pytest.fixture(scope="session")
def resolved() -> Callable[..., ResolvedConfig]:
    """`resolved(path, cache={...})`: the resolved config of a checkpoint in float32 on the CPU."""

    def resolve(path: Path, **sections: Mapping[str, Any]) -> ResolvedConfig:
        config = make_config(path, **sections)
        return resolve_config(config, TransformersModel.describe(resolve_model_settings(config)))

    return resolve


@pytest.fixture(scope="session")
def paged_model(
    tiny_model: Callable[[str], Path], resolved: Callable[..., ResolvedConfig]
) -> Callable[..., TransformersModel]:
    """Loads a tiny model through the adapter, once a session: `paged_model("llama", decoder="off")`."""
    loaded: dict[tuple[str, str], TransformersModel] = {}

    def load(name: str, decoder: str = "auto") -> TransformersModel:
        if (name, decoder) not in loaded:
            config = resolved(tiny_model(name), model={"decoder": decoder})
            loaded[name, decoder] = TransformersModel.load(config, torch.device("cpu"))
        return loaded[name, decoder]

    return load


class PagedBatch:
    """Sequences in a paged cache, their blocks handed out in an order of their own, with the reference kernels."""

    def __init__(self, model: TransformersModel, num_blocks: int = 64) -> None:
        self._model = model
        self._kernels = load_plugin(KERNELS, "reference").create(torch.device("cpu"))
        self._storage = [
            self._kernels.allocate(layer.cache_spec(BLOCK_SIZE, FP32), num_blocks) for layer in model.spec.layers
        ]
        self._free_blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        self._tables: dict[str, list[int]] = {}
        self._num_stored: dict[str, int] = {}

    def step(self, chunks: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """Runs the next tokens of some sequences, one-token rows first; logits [num_tokens, vocab] of each."""
        names = sorted(chunks, key=lambda name: len(chunks[name]) > 1)
        ranges = {name: self._extend(name, len(chunks[name])) for name in names}
        positions = torch.tensor([position for name in names for position in ranges[name]])
        batch = ModelInput(
            token_ids=torch.tensor([token for name in names for token in chunks[name]]),
            positions=positions,
            logit_rows=torch.arange(len(positions)),
        )
        logits = self._model.forward(batch, self._context(names, ranges))
        return dict(zip(names, logits.split([len(chunks[name]) for name in names]), strict=True))

    def _extend(self, name: str, num_tokens: int) -> range:
        start = self._num_stored.get(name, 0)
        table = self._tables.setdefault(name, [])
        while len(table) * BLOCK_SIZE < start + num_tokens:
            table.append(self._free_blocks.pop())
        self._num_stored[name] = start + num_tokens
        return range(start, start + num_tokens)

    def _context(self, names: Sequence[str], ranges: Mapping[str, range]) -> AttentionContext:
        lengths = [len(ranges[name]) for name in names]
        width = max(len(self._tables[name]) for name in names)
        slots = [
            self._tables[name][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for name in names
            for position in ranges[name]
        ]
        metadata = AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
            seq_lens=torch.tensor([ranges[name].stop for name in names], dtype=torch.int32),
            block_table=torch.tensor(
                [self._tables[name] + [0] * (width - len(self._tables[name])) for name in names], dtype=torch.int32
            ),
            slot_mapping=torch.tensor(slots),
            max_query_len=max(lengths),
            max_seq_len=max(ranges[name].stop for name in names),
            num_decodes=lengths.count(1),
        )
        return AttentionContext(self._kernels, self._storage, metadata)


@pytest.fixture
def paged_batch() -> type[PagedBatch]:
    return PagedBatch
