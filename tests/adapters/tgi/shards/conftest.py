"""The program that forks shards, loaded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .shard_client import Host


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()
