"""Parallel regions of an engine: one thread enters them, whichever threads use the engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading
from pagedkv.plugin import Engine, SamplingParams
params = SamplingParams(max_new_tokens=4, ignore_eos=True, do_sample=True, top_k=9, repetition_penalty=1.2, seed=1)
prompt = [504, 3575, 282, 4649, 314] * 60
settings = {"cache.num_blocks": 256, "limits.max_total_tokens": 1024, "model.threads": 2}
with Engine(sys.argv[1], backend=sys.argv[2], config=settings) as engine:
    def use():
        engine.generate([prompt] * 4, params)
        list(engine.stream(prompt, params))
    use()
    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
def test_one_thread_of_an_engine_enters_parallel_regions(save_tiny_llama: Callable[..., Path], backend: str) -> None:
    # Each thread that comes into a team tells once of which team, and which of its threads it is; 0 is who entered.
    teams = {"OMP_DISPLAY_AFFINITY": "TRUE", "OMP_AFFINITY_FORMAT": "omp-team %N %n %i"}
    model = save_tiny_llama(num_hidden_layers=1, max_position_embeddings=1024)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, model, backend], env={**os.environ, **teams}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^omp-team (\d+) (\d+) (\S+)$", done.stderr, re.MULTILINE)
    assert len({thread for size, number, thread in told if number == "0" and size != "1"}) == 1, told
    assert len({thread for _, number, thread in told if number != "0"}) == 1, told
