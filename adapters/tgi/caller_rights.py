"""Keeps callers over TCP apart: each may name its own batches alone.

The Unix socket belongs to whoever runs the server, who may do everything. Over TCP a caller is known by its
certificate, where `server.tls_client_ca` asks for one, and by the tenant in its metadata, where there is a
`server.cache_salt_metadata_key`. Where neither is set all of them are one, and nothing is kept apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pagedkv.adapters.rpc.calls import Context
from pagedkv.adapters.tgi import generate_pb2 as pb
from pagedkv.plugin.errors import ForbiddenError, NotFoundError

Caller = tuple[tuple[bytes, ...], str]
"""Names of the certificate, and the tenant."""

_UNIX_PREFIX = "unix"
_CERTIFICATE_NAMES = ("x509_subject", "x509_common_name", "x509_subject_alternative_name")
"""Of a client's certificate; they stay when it is renewed."""
_MAX_KEPT_OWNERS = 4096
"""Beyond so many, those of batches that have ended meanwhile are forgotten."""


class CallerRights:
    """A `GenerationService`'s methods, for a server that listens on TCP.

    Args:
        service: what calls reach that are allowed.
        is_live: whether a batch of this id has live requests.
        salt_metadata_key: of the metadata that names the tenant; empty where there is none.
    """

    def __init__(self, service: Any, is_live: Callable[[int], bool], salt_metadata_key: str) -> None:
        self._service = service
        self._is_live = is_live
        self._salt_metadata_key = salt_metadata_key
        self._owners: dict[int, Caller | None] = {}
        """By batch; None where it came over the Unix socket."""
        self._arriving: set[int] = set()
        """Batches whose Prefill has not answered yet."""

    async def info(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        response: pb.InfoResponse = await self._service.info(request, context)
        return response

    async def service_discovery(
        self, request: pb.ServiceDiscoveryRequest, context: Context
    ) -> pb.ServiceDiscoveryResponse:
        response: pb.ServiceDiscoveryResponse = await self._service.service_discovery(request, context)
        return response

    async def health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        response: pb.HealthResponse = await self._service.health(request, context)
        return response

    async def warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        """Raises ForbiddenError for a caller without a tenant, where tenants are kept apart."""
        self._require_tenant(self._identify(context), "a Warmup")
        response: pb.WarmupResponse = await self._service.warmup(request, context)
        return response

    async def clear_cache(self, request: pb.ClearCacheRequest, context: Context) -> pb.ClearCacheResponse:
        """Without an id it ends the caller's own batches. Another's id is passed over, as one that does not exist.

        Raises ForbiddenError for a call without id of a caller without a tenant, where tenants are kept apart."""
        caller = self._identify(context)
        if request.HasField("id"):
            if self._may_name(caller, request.id):
                await self._service.clear_cache(request, context)
                self._owners.pop(request.id, None)
        elif caller is None:
            await self._service.clear_cache(request, context)
            self._owners.clear()
        else:
            self._require_tenant(caller, "a ClearCache without an id")
            for batch_id in [batch_id for batch_id, owner in self._owners.items() if owner == caller]:
                await self._service.clear_cache(pb.ClearCacheRequest(id=batch_id), context)
                self._owners.pop(batch_id, None)
        return pb.ClearCacheResponse()

    async def filter_batch(self, request: pb.FilterBatchRequest, context: Context) -> pb.FilterBatchResponse:
        """Raises NotFoundError for another caller's batch, as for one that does not exist."""
        self._refuse_others(self._identify(context), [request.batch_id])
        response: pb.FilterBatchResponse = await self._service.filter_batch(request, context)
        return response

    async def prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillResponse:
        """Makes the new batch the caller's own. Raises NotFoundError where another's runs along."""
        caller = self._identify(context)
        if request.HasField("cached_batch"):
            self._refuse_others(caller, [request.cached_batch.id])
        batch_id = request.batch.id
        if batch_id in self._arriving or self._is_live(batch_id):
            # The service refuses it, whoever asks; it must not change hands meanwhile.
            refused: pb.PrefillResponse = await self._service.prefill(request, context)
            return refused
        self._forget_ended()
        self._owners[batch_id] = caller
        self._arriving.add(batch_id)
        try:
            response: pb.PrefillResponse = await self._service.prefill(request, context)
        finally:
            self._arriving.discard(batch_id)
        return response

    async def decode(self, request: pb.DecodeRequest, context: Context) -> pb.DecodeResponse:
        """Raises NotFoundError for another caller's batch, as for one that does not exist."""
        self._refuse_others(self._identify(context), [batch.id for batch in request.batches])
        response: pb.DecodeResponse = await self._service.decode(request, context)
        return response

    def _identify(self, context: Context) -> Caller | None:
        """Who calls; None over the Unix socket."""
        if context.peer().startswith(_UNIX_PREFIX):
            return None
        metadata = context.invocation_metadata() or ()
        tenants = [str(value) for key, value in metadata if key == self._salt_metadata_key and key]
        certificate = context.auth_context()
        names = tuple(name for key in _CERTIFICATE_NAMES for name in certificate.get(key, ()))
        return names, "\0".join(tenants)

    def _may_name(self, caller: Caller | None, batch_id: int) -> bool:
        return caller is None or self._owners.get(batch_id) == caller or not self._is_live(batch_id)

    def _refuse_others(self, caller: Caller | None, batch_ids: Iterable[int]) -> None:
        for batch_id in batch_ids:
            if not self._may_name(caller, batch_id):
                raise NotFoundError(f"there is no batch {batch_id}: all its requests have ended, or it never was")

    def _require_tenant(self, caller: Caller | None, call: str) -> None:
        if caller is not None and self._salt_metadata_key and not caller[1]:
            raise ForbiddenError(
                f"{call} over TCP needs a tenant in the metadata key {self._salt_metadata_key}, or the Unix socket"
            )

    def _forget_ended(self) -> None:
        if len(self._owners) >= _MAX_KEPT_OWNERS:
            self._owners = {batch_id: owner for batch_id, owner in self._owners.items() if self._is_live(batch_id)}
