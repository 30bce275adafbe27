"""A cache manager that logs how much of each prompt it found in the cache."""

import logging

from pagedkv.plugin.cache.manager import PagedCacheManager
from pagedkv.plugin.interface import BlockGrant
from pagedkv.plugin.requests import RequestId

logger = logging.getLogger("pagedkv.prefix_log")


class PrefixLogCacheManager(PagedCacheManager):
    """The paged cache manager, talking."""

    interface_version = (2, 0)

    def acquire(self, seq_id: RequestId, num_tokens: int) -> BlockGrant | None:
        is_admission = not self.block_table(seq_id)
        grant = super().acquire(seq_id, num_tokens)
        if grant is not None and is_admission:
            logger.info("sequence %d: %d tokens found in the cache", seq_id, grant.num_cached_tokens)
        return grant
