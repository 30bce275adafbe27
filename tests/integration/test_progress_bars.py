"""Commands show no progress bars of the libraries that they use, unless asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SCRIPT = """
import sys
from pagedkv.integration.progress_bars import hide_progress_bars
hide_progress_bars()
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])
for _ in tqdm(range(2), desc="theirs"): pass
for _ in tqdm(range(2), desc="ours", disable=False): pass
"""


@pytest.mark.parametrize(("log_level", "is_shown"), [("INFO", False), ("DEBUG", True)])
def test_bars_of_others_are_hidden(tmp_path: Path, log_level: str, is_shown: bool) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)).save_pretrained(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "model", tmp_path / "copy"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PAGEDKV_LOG_LEVEL": log_level},
    )
    shown = {name: name in done.stderr for name in ("Loading weights", "Writing model shards", "theirs", "ours")}
    assert shown == {"Loading weights": is_shown, "Writing model shards": is_shown, "theirs": is_shown, "ours": True}
