"""The deployment files, as far as they can be checked without what runs them: they parse, and agree with each other and
with the code."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagedkv.integration.serve.launcher_shim import SHIM_NAME, write_shim
from pagedkv.plugin.config import CONFIG_FILE_VARIABLE, Config, parse_config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "integration" / "deploy"
INSTRUCTIONS = {"ARG", "FROM", "COPY", "RUN", "ENV", "WORKDIR", "USER", "ENTRYPOINT", "HEALTHCHECK"}
LAUNCHER_FLAGS = {"--model-id", "--port", "--num-shard", "--json-output"}
SECONDS = {"s": 1, "m": 60}


def _load(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def _instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Containerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def _config(text: str) -> Config:
    return parse_config(tomllib.loads(text))


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    (document,) = _load("compose.yaml")
    return document


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    """The Kubernetes objects by kind."""
    return {document["kind"]: document for document in _load("kubernetes.yaml")}


@pytest.fixture(scope="module")
def pod(cluster: dict[str, Any]) -> dict[str, Any]:
    return cluster["Deployment"]["spec"]["template"]["spec"]


class TestContainerfile:
    def test_instructions_are_known_and_begin_with_a_base(self) -> None:
        names = [name for name, _ in _instructions()]
        assert set(names) <= INSTRUCTIONS
        assert next(name for name in names if name != "ARG") == "FROM"

    def test_everything_that_is_copied_is_there_and_enough_to_install(self) -> None:
        copies = [arguments for name, arguments in _instructions() if name == "COPY"]
        copied = [arguments.split() for arguments in copies if "--from" not in arguments]
        sources = {source for *sources, _ in copied for source in sources}
        assert [source for source in sources if not (ROOT / source).exists()] == []
        packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
        assert sources >= {"pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE", *packages}

    def test_images_are_pinned_and_every_argument_is_declared(self) -> None:
        arguments = dict(value.split("=", 1) for name, value in _instructions() if name == "ARG")
        assert all(re.fullmatch(r".+:[0-9][0-9.]+", image) for image in arguments.values())
        used = re.findall(r"\$\{(\w+)\}", " ".join(value for name, value in _instructions() if name == "FROM"))
        assert set(used) == set(arguments)

    def test_the_shim_s_folder_comes_first_on_the_path(self, tmp_path: Path) -> None:
        (command,) = [value for name, value in _instructions() if name == "RUN" and "install-launcher-shim" in value]
        folder = command.split("install-launcher-shim")[1].split()[0]
        assert ("ENV", f"PATH={folder}:$PATH") in _instructions()
        assert write_shim(tmp_path, "python").name == SHIM_NAME
        assert f"export PATH={folder}:$PATH" in (DEPLOY / "entrypoint.sh").read_text()

    def test_entrypoint_is_ours_can_be_run_and_is_tried_as_the_user_it_gets(self) -> None:
        instructions = _instructions()
        (entrypoint,) = [value for name, value in instructions if name == "ENTRYPOINT"]
        (path,) = json.loads(entrypoint)
        assert ("COPY", f"integration/deploy/entrypoint.sh {path}") in instructions
        assert os.access(DEPLOY / "entrypoint.sh", os.X_OK)
        (user,) = [index for index, (name, _) in enumerate(instructions) if name == "USER"]
        assert any(name == "RUN" and path in value for name, value in instructions[user:])


class TestCompose:
    def test_config_file_is_valid_and_mounted_where_the_variable_points(self, compose) -> None:
        tgi = compose["services"]["tgi"]
        _config((DEPLOY / "pagedkv.toml").read_text())
        assert f"./pagedkv.toml:{tgi['environment'][CONFIG_FILE_VARIABLE]}:ro" in tgi["volumes"]

    def test_every_file_it_names_is_there(self, compose) -> None:
        mounts = [volume for service in compose["services"].values() for volume in service["volumes"]]
        files = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]
        assert len(files) == 5
        named = {mount.split(":")[0] for mount in mounts if not mount.startswith((".", "$"))}
        assert named == set(compose["volumes"])
        assert [file for file in files if not (DEPLOY / file).exists()] == []
        build = compose["services"]["tgi"]["build"]
        assert (DEPLOY / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).is_file()

    def test_every_service_has_its_memory_and_listens_on_this_machine_alone(self, compose) -> None:
        for service in compose["services"].values():
            assert {"mem_limit", "shm_size"} <= set(service)
            assert all(port.startswith("127.0.0.1:") for port in service["ports"])

    def test_it_waits_longer_for_the_end_than_a_drain_takes(self, compose) -> None:
        number, unit = re.fullmatch(r"(\d+)([sm])", compose["services"]["tgi"]["stop_grace_period"]).groups()
        drain_timeout_s = _config((DEPLOY / "pagedkv.toml").read_text()).server.drain_timeout_s
        assert int(number) * SECONDS[unit] > drain_timeout_s

    def test_prometheus_scrapes_the_router_and_pagedkv_and_has_the_rules(self, compose) -> None:
        (prometheus,) = _load("prometheus.yaml")
        jobs = {job["job_name"]: job["static_configs"][0]["targets"] for job in prometheus["scrape_configs"]}
        ((host, port),) = [target.split(":") for target in jobs["text-generation-inference"]]
        command = compose["services"][host]["command"]
        assert command[command.index("--port") + 1] == port
        listen = _config((DEPLOY / "pagedkv.toml").read_text()).metrics.listen
        assert jobs["pagedkv"] == [f"{host}:{listen.rpartition(':')[2]}"]
        (rules,) = prometheus["rule_files"]
        assert f"./alerts.yaml:{rules}:ro" in compose["services"]["prometheus"]["volumes"]


class TestKubernetes:
    def test_objects_have_what_every_object_needs(self, cluster) -> None:
        assert set(cluster) == {"ConfigMap", "Deployment", "Service", "PodDisruptionBudget"}
        assert all(document["apiVersion"] and document["metadata"]["name"] for document in cluster.values())

    def test_service_finds_the_replicas(self, cluster, pod) -> None:
        labels = cluster["Deployment"]["spec"]["template"]["metadata"]["labels"]
        assert cluster["Deployment"]["spec"]["replicas"] > 1
        for selector in (
            cluster["Service"]["spec"]["selector"],
            cluster["Deployment"]["spec"]["selector"]["matchLabels"],
            cluster["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        ):
            assert selector.items() <= labels.items()
        (container,) = pod["containers"]
        port, metrics = container["ports"]
        listen = _config(cluster["ConfigMap"]["data"]["pagedkv.toml"]).metrics.listen
        assert listen.rpartition(":")[2] == str(metrics["containerPort"])
        assert cluster["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
        assert container["args"][container["args"].index("--port") + 1] == str(port["containerPort"])
        for probe in ("readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
        *_, command = container["startupProbe"]["exec"]["command"]
        _check_start_check(command, port["containerPort"])
        assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 600

    def test_pods_have_no_rights_and_no_variables_of_services(self, pod) -> None:
        (user,) = [value for name, value in _instructions() if name == "USER"]
        context = pod["securityContext"]
        assert context["runAsNonRoot"]
        assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
        assert pod["enableServiceLinks"] is False
        (container,) = pod["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}

    def test_config_is_valid_and_mounted_where_the_variable_points(self, cluster, pod) -> None:
        data = cluster["ConfigMap"]["data"]
        config = _config(data["pagedkv.toml"])
        assert pod["terminationGracePeriodSeconds"] > config.server.drain_timeout_s
        (container,) = pod["containers"]
        (variable,) = container["env"]
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "config"]
        assert (variable["name"], variable["value"]) == (CONFIG_FILE_VARIABLE, f"{mount['mountPath']}/pagedkv.toml")

    def test_every_mount_has_its_volume_and_shared_memory_is_memory_within_the_limit(self, pod) -> None:
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        (kernels,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "kernels"]
        caches = " ".join(value for name, value in _instructions() if name == "ENV")
        assert f"XDG_CACHE_HOME={kernels} TRITON_CACHE_DIR={kernels}/" in caches
        shared = volumes["shared-memory"]["emptyDir"]
        assert shared["medium"] == "Memory"
        limits, requests = container["resources"]["limits"], container["resources"]["requests"]
        assert _gibibytes(shared["sizeLimit"]) < _gibibytes(requests["memory"]) <= _gibibytes(limits["memory"])


def _check_start_check(command: str, port: int) -> None:
    """A probe asks the shard who it is, and the router whether it serves."""
    check, health = command.split(" && ")
    assert check == "pagedkv check-server"
    assert health.startswith("curl --fail ")
    assert health.endswith(f" http://localhost:{port}/health")


def test_compose_asks_who_has_started(compose) -> None:
    service = compose["services"]["tgi"]
    kind, command = service["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    _check_start_check(command, 8080)
    assert "kernels:/cache" in service["volumes"]


def test_launcher_gets_no_flag_that_is_not_its_own(compose, pod) -> None:
    for arguments in (compose["services"]["tgi"]["command"], pod["containers"][0]["args"]):
        assert {argument for argument in arguments if argument.startswith("--")} <= LAUNCHER_FLAGS


def test_both_deployments_serve_with_the_same_config(cluster) -> None:
    file = _config((DEPLOY / "pagedkv.toml").read_text())
    assert _config(cluster["ConfigMap"]["data"]["pagedkv.toml"]) == file


def _gibibytes(quantity: str) -> int:
    return int(quantity.removesuffix("Gi"))
