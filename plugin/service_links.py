"""Variables that Kubernetes makes of a Service's name, in every pod of its namespace: they are no config keys.

A Service `pagedkv` gives PAGEDKV_SERVICE_HOST, PAGEDKV_SERVICE_PORT, PAGEDKV_SERVICE_PORT_HTTP (a port with a name),
PAGEDKV_PORT (an address) and PAGEDKV_PORT_80_TCP with its _PROTO, _PORT and _ADDR; one `pagedkv-metrics` the same with
PAGEDKV_METRICS.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SERVICE_LINK = re.compile(
    r"[A-Z0-9_]+_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)


def is_service_link(variable: str) -> bool:
    """Whether Kubernetes names a variable so. No key of the config has such a name; a test holds it."""
    return _SERVICE_LINK.fullmatch(variable) is not None


def list_service_links(variables: Iterable[str], prefix: str) -> list[str]:
    """Those that begin with a prefix, in order."""
    return sorted(name for name in variables if name.startswith(prefix) and is_service_link(name))
