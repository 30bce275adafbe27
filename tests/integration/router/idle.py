"""Whether a server has given back everything."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Sequence

TIMEOUT_S = 20
_HELD = ("pagedkv_cache_blocks{", "pagedkv_requests_running{", "pagedkv_requests_waiting{")


def read_held(urls: Sequence[str]) -> dict[str, float]:
    """The metrics of all shards that count what requests hold, and are not 0."""
    held = {}
    for url in urls:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            lines = answer.read().decode().splitlines()
        counts = [line for line in lines if line.startswith(_HELD) and 'state="cached"' not in line]
        counts = [line for line in counts if 'state="free"' not in line]
        assert len(counts) == len(_HELD), "the metrics have other names than this test"
        held |= {f"{url} {line.rsplit(' ', 1)[0]}": float(line.rsplit(" ", 1)[1]) for line in counts}
    return {name: count for name, count in held.items() if count}


def wait_until_nothing_is_held(urls: Sequence[str]) -> None:
    """What was said to end ends behind the step that runs. Raises AssertionError where something stays."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while held := read_held(urls):
        assert time.monotonic() < deadline_s, f"nothing runs, but this is held: {held}"
        time.sleep(0.01)
