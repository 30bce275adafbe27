"""Variables that Kubernetes makes of a Service's name beside keys of the config."""

from __future__ import annotations

import pytest

from pagedkv.plugin.config import list_config_keys, load_config
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.service_links import is_service_link, list_service_links

LINKS = {
    "PAGEDKV_SERVICE_HOST": "10.0.0.1",
    "PAGEDKV_SERVICE_PORT": "80",
    "PAGEDKV_SERVICE_PORT_HTTP": "80",
    "PAGEDKV_PORT": "tcp://10.0.0.1:80",
    "PAGEDKV_PORT_80_TCP": "tcp://10.0.0.1:80",
    "PAGEDKV_PORT_80_TCP_PROTO": "tcp",
    "PAGEDKV_PORT_80_TCP_PORT": "80",
    "PAGEDKV_PORT_80_TCP_ADDR": "10.0.0.1",
    "PAGEDKV_METRICS_SERVICE_HOST": "10.0.0.2",
    "PAGEDKV_METRICS_PORT": "udp://10.0.0.2:9464",
    "PAGEDKV_METRICS_PORT_9464_UDP_ADDR": "10.0.0.2",
}


def test_they_change_nothing() -> None:
    assert load_config(environ=LINKS) == load_config(environ={})
    assert list_service_links([*LINKS, "PATH", "REDIS_SERVICE_HOST"], "PAGEDKV_") == sorted(LINKS)


@pytest.mark.parametrize(
    "name", ["PAGEDKV_CACHE_BLOKSIZE", "PAGEDKV_SERVER_HOST", "PAGEDKV_PORT_80", "PAGEDKV_SERVICE", "PAGEDKV_TCP_PORTS"]
)
def test_a_key_that_does_not_exist_is_refused_all_the_same(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown environment variable {name}"):
        load_config(environ={**LINKS, name: "8"})


def test_no_key_is_named_as_a_link_is() -> None:
    assert not [key.path for key in list_config_keys() if is_service_link(key.environment_variable)]
