"""The quickstart, from the demo model to the last table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.integration import quickstart


@pytest.mark.slow
def test_quickstart_shows_a_prefix_hit_that_the_contiguous_backend_has_not(demo_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, quickstart.__file__], capture_output=True, text=True, timeout=290, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {words[0]: words for line in done.stdout.splitlines() if (words := line.split()) and len(words) == 7}
    hits = {backend: int(rows[backend][5]) for backend in quickstart.BACKENDS}
    assert hits["paged"] >= 500
    assert hits["contiguous"] == 0
    assert done.stdout.count(" ended: ") == 4
