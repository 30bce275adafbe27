"""Recognizes the variables that Kubernetes sets in every pod for each Service of the namespace.

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
    """Whether Kubernetes may have set a variable of this name. No key of the config has such a name."""
    return _SERVICE_LINK.fullmatch(variable) is not None


def list_service_links(variables: Iterable[str], prefix: str) -> list[str]:
    """Returns those that begin with the prefix, sorted."""
    return sorted(name for name in variables if name.startswith(prefix) and is_service_link(name))
