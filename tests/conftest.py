"""What every test may use: the demo model, and settings that make runs repeatable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from pagedkv.integration.demo_model import ensure_demo_model

settings.register_profile("fast", derandomize=True, deadline=None, max_examples=25, database=None)
settings.register_profile(
    "thorough",
    derandomize=False,
    deadline=None,
    max_examples=1000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist share the cores: one thread each, so that they don't fight for them.
    torch.set_num_threads(1 if hasattr(config, "workerinput") else min(2, os.cpu_count() or 1))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Directory of SmolLM2-135M-Instruct in bfloat16, made on first use and cached between runs."""
    return ensure_demo_model()
