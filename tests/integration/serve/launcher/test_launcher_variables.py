"""The launcher's environment: what sets a key, what is refused, and what has no effect."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pagedkv.integration.serve.launcher_command import configure
from pagedkv.integration.serve.launcher_flags import ServeFlags
from pagedkv.integration.serve.launcher_variables import (
    DEFAULT_GRAPH_SIZES,
    VARIABLES,
    find_refusals,
    markdown_table,
    translate_variables,
)
from pagedkv.plugin.config import list_config_keys
from pagedkv.plugin.errors import ConfigError

DROP_IN = Path(__file__).resolve().parents[4] / "integration" / "docs" / "DROP_IN.md"

READ_BY_STOCK_SERVER = """
ATTENTION CUDA_GRAPHS CUDA_MEMORY_FRACTION DEBUG DISABLE_CUSTOM_KERNELS DISABLE_EXLLAMA EXLLAMA_VERSION HF_HUB_OFFLINE
HUGGINGFACE_HUB_CACHE LORA_ADAPTERS MASTER_ADDR MASTER_PORT OMP_NUM_THREADS PREFILL_CHUNKING PREFIX_CACHING
PYTORCH_TUNABLEOP_ENABLED PYTORCH_TUNABLEOP_SEQLENS PYTORCH_TUNABLEOP_TUNING PYTORCH_TUNABLEOP_TUNING_AFTER_WARMUP RANK
REQUEST_LOGPROBS ROCM_USE_CUSTOM_PAGED_ATTN ROCM_USE_FLASH_ATTN_V2_TRITON ROCM_USE_SKINNY_GEMM ROPE_FACTOR ROPE_SCALING
TGI_WIGGLE_ROOM USE_CUTLASS_W8A8 USE_FLASH_ATTENTION WATERMARK_DELTA WATERMARK_GAMMA WEIGHTS_CACHE_OVERRIDE WORLD_SIZE
XPU_MEMORY_FRACTION
"""
"""What text_generation_server 3.3.6 takes from its environment by os.getenv and os.environ, in any of its modules."""

SET_BY_LAUNCHER = """
RANK WORLD_SIZE MASTER_ADDR MASTER_PORT TORCH_NCCL_AVOID_RECORD_STREAMS CUDA_MEMORY_FRACTION SAFETENSORS_FAST_GPU
HF_HUB_DISABLE_PROGRESS_BARS HF_HUB_ENABLE_HF_TRANSFER HF_TOKEN ROPE_SCALING ROPE_FACTOR MAX_TOTAL_TOKENS MAX_BATCH_SIZE
LORA_ADAPTERS REQUEST_LOGPROBS HUGGINGFACE_HUB_CACHE WEIGHTS_CACHE_OVERRIDE CUDA_GRAPHS DISABLE_CUSTOM_KERNELS
WATERMARK_GAMMA WATERMARK_DELTA PREFIX_CACHING ATTENTION
"""
"""What the launcher of 3.3.6 puts into a shard's environment."""

FLAGS = ServeFlags(model_id="some/model", uds_path="socket")
DEFAULTS = {
    "CUDA_MEMORY_FRACTION": "1",
    "CUDA_GRAPHS": DEFAULT_GRAPH_SIZES,
    "PREFIX_CACHING": "true",
    "ATTENTION": "flashinfer",
    "MAX_TOTAL_TOKENS": "",
}
"""Of a launcher without flags."""


def test_no_variable_of_the_stock_server_or_the_launcher_is_without_an_answer() -> None:
    names = [variable.name for variable in VARIABLES]
    assert len(set(names)) == len(names)
    assert set(names) == {*READ_BY_STOCK_SERVER.split(), *SET_BY_LAUNCHER.split()}
    assert {variable.key for variable in VARIABLES if variable.key} <= {key.path for key in list_config_keys()}


def test_table_of_drop_in_is_this_one() -> None:
    assert markdown_table() in DROP_IN.read_text(encoding="utf-8"), (
        "run `python tests/integration/docs/update_tables.py`"
    )


def test_a_launcher_without_flags_sets_nothing() -> None:
    assert translate_variables(DEFAULTS) == {}
    assert find_refusals(DEFAULTS) == []
    assert configure(FLAGS, DEFAULTS) == configure(FLAGS, {})


def test_what_the_launcher_was_asked_for_becomes_keys() -> None:
    variables = {
        "CUDA_MEMORY_FRACTION": "0.5",
        "MAX_TOTAL_TOKENS": "3000",
        "MAX_BATCH_SIZE": "7",
        "CUDA_GRAPHS": "1,2",
        "PREFIX_CACHING": "0",
        "PREFILL_CHUNKING": "False",
    }
    config = configure(FLAGS, {**DEFAULTS, **variables})
    assert config.cache.memory_fraction == 0.5
    assert config.limits.max_total_tokens == 3000
    assert config.scheduler.max_num_sequences == 7
    assert config.graphs.batch_sizes == (1, 2)
    assert not config.cache.prefix_caching
    assert not config.server.chunked_prefill


def test_wiggle_room_is_a_share_of_the_memory_fraction() -> None:
    assert configure(FLAGS, {**DEFAULTS, "TGI_WIGGLE_ROOM": "0.8"}).cache.memory_fraction == 0.8
    both = {**DEFAULTS, "CUDA_MEMORY_FRACTION": "0.5", "TGI_WIGGLE_ROOM": "0.8"}
    assert configure(FLAGS, both).cache.memory_fraction == 0.4


@pytest.mark.parametrize("value", ["1", "true", "True", "TRUE"])
def test_switches_that_are_on_leave_the_file_its_say(value: str, tmp_path: Path) -> None:
    file = tmp_path / "pagedkv.toml"
    file.write_text("[cache]\nprefix_caching = false\n[server]\nchunked_prefill = false\n")
    switches = {"PREFIX_CACHING": value, "PREFILL_CHUNKING": value}
    config = configure(FLAGS, {**DEFAULTS, **switches, "PAGEDKV_CONFIG": str(file)})
    assert not config.cache.prefix_caching
    assert not config.server.chunked_prefill


def test_prefix_caching_that_the_launcher_turned_off_for_other_kernels_stays_on(caplog) -> None:
    """It does so where the size of heads is none of 64, 128 and 256, or the GPU is old."""
    with caplog.at_level(logging.INFO):
        config = configure(FLAGS, {**DEFAULTS, "PREFIX_CACHING": "0", "ATTENTION": "paged"})
    assert config.cache.prefix_caching
    (record,) = caplog.records
    assert "PAGEDKV_CACHE_PREFIX_CACHING=false turns it off" in record.getMessage()


class TestGraphs:
    def test_without_the_variable_there_are_none_under_the_launcher(self, tmp_path: Path) -> None:
        """`--cuda-graphs 0` lets the launcher set no variable at all."""
        file = tmp_path / "pagedkv.toml"
        file.write_text("[graphs]\nbatch_sizes = [1, 2]\n")
        variables = {name: value for name, value in DEFAULTS.items() if name != "CUDA_GRAPHS"}
        assert configure(FLAGS, variables).graphs.batch_sizes == ()
        assert configure(FLAGS, {**variables, "PAGEDKV_CONFIG": str(file)}).graphs.batch_sizes == ()
        own = {**variables, "PAGEDKV_GRAPHS_BATCH_SIZES": "4"}
        assert configure(FLAGS, own).graphs.batch_sizes == (4,)

    def test_the_launcher_s_default_is_nobody_s_wish(self, tmp_path: Path) -> None:
        file = tmp_path / "pagedkv.toml"
        file.write_text("[graphs]\nbatch_sizes = [3, 5]\n")
        assert configure(FLAGS, DEFAULTS).graphs.batch_sizes == "auto"
        assert configure(FLAGS, {**DEFAULTS, "PAGEDKV_CONFIG": str(file)}).graphs.batch_sizes == (3, 5)
        asked = {**DEFAULTS, "CUDA_GRAPHS": "1,2", "PAGEDKV_CONFIG": str(file)}
        assert configure(FLAGS, asked).graphs.batch_sizes == (1, 2)

    def test_who_runs_the_command_by_hand_gets_what_the_variable_says(self) -> None:
        assert configure(FLAGS, {}).graphs.batch_sizes == "auto"
        assert configure(FLAGS, {"CUDA_GRAPHS": "0"}).graphs.batch_sizes == ()
        assert configure(FLAGS, {"CUDA_GRAPHS": DEFAULT_GRAPH_SIZES}).graphs.batch_sizes == (1, 2, 4, 8, 16, 32)


def test_refused_ones_at_a_value_that_is_ours_anyway_are_taken() -> None:
    configure(FLAGS, {"WATERMARK_GAMMA": "0.50", "WATERMARK_DELTA": "2", "LORA_ADAPTERS": ""})


@pytest.mark.parametrize("name", ["CUDA_MEMORY_FRACTION", "TGI_WIGGLE_ROOM", "WATERMARK_DELTA"])
def test_variable_that_is_no_number_is_refused_by_its_own_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a number"):
        configure(FLAGS, {name: "much"})
