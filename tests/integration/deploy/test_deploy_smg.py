"""The deployment files of the SMG door, as far as they can be checked without what runs them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagedkv.integration.cli.serve import DEFAULT_ADDRESS
from pagedkv.plugin.config import CONFIG_FILE_VARIABLE, Config, parse_config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "integration" / "deploy" / "smg"
USER = 10001
WORKER_PORT = int(DEFAULT_ADDRESS.rpartition(":")[2])
GATEWAY_FLAGS = {
    *("--host", "--port", "--prometheus-host", "--prometheus-port", "--policy", "--log-level", "--worker-urls"),
    *("--worker-startup-check-interval", "--shutdown-grace-period-secs", "--service-discovery", "--selector"),
    *("--service-discovery-port", "--service-discovery-namespace"),
}


def config_of(text: str) -> Config:
    return parse_config(tomllib.loads(text))


def flags_of(arguments: list[str]) -> dict[str, str]:
    pairs = [argument.split("=", 1) for argument in arguments if argument.startswith("--")]
    return {name: rest[0] if rest else "" for name, *rest in pairs}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def objects() -> dict[tuple[str, str], dict[str, Any]]:
    """The Kubernetes objects by kind and name."""
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


@pytest.fixture(scope="module")
def pods(objects) -> dict[str, dict[str, Any]]:
    return {
        "worker": objects["StatefulSet", "pagedkv-worker"]["spec"]["template"]["spec"],
        "gateway": objects["Deployment", "pagedkv-gateway"]["spec"]["template"]["spec"],
    }


def test_images_install_from_what_is_here_and_run_without_rights() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    lines = text.replace("\\\n", " ").splitlines()
    copied = [source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    assert set(copied) >= {"pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE", *packages}
    assert re.findall(r"AS (\w+)", text) == ["worker", "gateway"]
    assert text.count(f"USER {USER}:{USER}") == 2
    worker, gateway = (json.loads(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT"))
    assert worker == ["pagedkv", "serve", "--protocol", "smg", "--listen", f"0.0.0.0:{WORKER_PORT}"]
    assert gateway == ["smg", "launch"]
    assert "smg==" in (ROOT / "constraints.txt").read_text()


def test_compose_starts_the_gateway_on_this_machine_alone_before_warm_workers(compose) -> None:
    services = compose["services"]
    workers = {name for name in services if name.startswith("worker")}
    gateway = services["gateway"]
    assert {url for url in gateway["command"] if url.startswith("grpc")} == {
        f"grpc://{name}:{WORKER_PORT}" for name in workers
    }
    assert gateway["depends_on"] == {name: {"condition": "service_healthy"} for name in workers}
    assert all(port.startswith("127.0.0.1:") for port in gateway["ports"])
    assert not any("ports" in services[name] for name in workers)
    assert set(flags_of(gateway["command"])) <= GATEWAY_FLAGS
    for name, service in services.items():
        target = "gateway" if name == "gateway" else "worker"
        assert service["build"]["target"] == target
        assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]


def test_compose_asks_workers_by_grpc_s_health_and_waits_longer_than_they_drain(compose) -> None:
    config = config_of((DEPLOY / "pagedkv.toml").read_text())
    for name in ("worker-0", "worker-1"):
        worker = compose["services"][name]
        *_, code = worker["healthcheck"]["test"]
        compile(code, name, "exec")
        assert f'"127.0.0.1:{WORKER_PORT}"' in code
        assert f"./pagedkv.toml:{worker['environment'][CONFIG_FILE_VARIABLE]}:ro" in worker["volumes"]
        assert int(worker["stop_grace_period"].removesuffix("s")) > config.server.drain_timeout_s
    assert flags_of(compose["services"]["gateway"]["command"])["--shutdown-grace-period-secs"] == "60"


def test_the_gateway_finds_the_workers_by_their_label_and_may_look_for_them(objects, pods) -> None:
    (gateway,) = pods["gateway"]["containers"]
    flags = flags_of(gateway["args"])
    assert set(flags) <= GATEWAY_FLAGS
    name, _, value = flags["--selector"].partition("=")
    assert objects["StatefulSet", "pagedkv-worker"]["spec"]["template"]["metadata"]["labels"][name] == value
    (worker,) = pods["worker"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in worker["ports"]}
    assert flags["--service-discovery-port"] == str(ports["grpc"]) == str(WORKER_PORT)
    assert flags["--service-discovery-namespace"] == f"$({gateway['env'][0]['name']})"
    (rule,) = objects["Role", "pagedkv-gateway"]["rules"]
    assert (rule["resources"], set(rule["verbs"])) == (["pods"], {"get", "list", "watch"})
    account = pods["gateway"]["serviceAccountName"]
    assert objects["RoleBinding", "pagedkv-gateway"]["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert ("ServiceAccount", account) in objects


def test_pods_have_no_rights_a_read_only_root_and_every_mount_its_volume(pods) -> None:
    for pod in pods.values():
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == USER
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert "/tmp" in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert pods["worker"]["automountServiceAccountToken"] is False


def test_probes_ask_what_each_can_answer(pods) -> None:
    (worker,) = pods["worker"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert worker[probe]["grpc"] == {"port": WORKER_PORT}
    assert worker["startupProbe"]["periodSeconds"] * worker["startupProbe"]["failureThreshold"] >= 600
    (gateway,) = pods["gateway"]["containers"]
    assert gateway["readinessProbe"]["httpGet"] == {"path": "/readiness", "port": "http"}
    assert gateway["livenessProbe"]["httpGet"] == {"path": "/health", "port": "http"}


def test_pods_are_given_longer_than_a_drain_takes_and_the_config_is_mounted(objects, pods) -> None:
    text = objects["ConfigMap", "pagedkv-worker"]["data"]["pagedkv.toml"]
    config = config_of(text)
    assert config == config_of((DEPLOY / "pagedkv.toml").read_text())
    for pod in pods.values():
        assert pod["terminationGracePeriodSeconds"] > config.server.drain_timeout_s
    (worker,) = pods["worker"]["containers"]
    (variable,) = worker["env"]
    (mount,) = [mount for mount in worker["volumeMounts"] if mount["name"] == "config"]
    assert (variable["name"], variable["value"]) == (CONFIG_FILE_VARIABLE, f"{mount['mountPath']}/pagedkv.toml")
    ports = {port["name"]: port["containerPort"] for port in worker["ports"]}
    assert config.metrics.listen.rpartition(":")[2] == str(ports["metrics"])


def test_only_the_gateway_reaches_workers_and_only_the_namespace_the_gateway(objects) -> None:
    policies = {name: one["spec"] for (kind, name), one in objects.items() if kind == "NetworkPolicy"}
    assert set(policies) == {"pagedkv-worker", "pagedkv-gateway"}
    calls, scrapes = policies["pagedkv-worker"]["ingress"]
    assert calls == {
        "from": [{"podSelector": {"matchLabels": {"app": "pagedkv-gateway"}}}],
        "ports": [{"port": "grpc"}],
    }
    assert scrapes["ports"] == [{"port": "metrics"}]
    assert policies["pagedkv-gateway"]["ingress"][0]["from"] == [{"podSelector": {}}]
    for name, spec in policies.items():
        assert spec["podSelector"]["matchLabels"] == {"app": name}
        assert spec["policyTypes"] == ["Ingress"]
