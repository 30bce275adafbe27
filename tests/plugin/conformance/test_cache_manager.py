"""The paged cache manager through the suite that any cache manager can be run through, found by its registered name."""

from __future__ import annotations

from pagedkv.plugin.conformance.cache_manager import CacheManagerConformance


class TestPagedCacheManager(CacheManagerConformance):
    cache_manager_name = "paged"
