"""Weights in a directory, in the hub's cache, and on a hub: which files are taken, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pagedkv.integration.serve.launcher_shim import write_shim
from pagedkv.integration.serve.weights import ensure_weights
from pagedkv.plugin.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOBODY = "http://127.0.0.1:9"
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})


def _fill(directory: Path, *names: str, **texts: str) -> Path:
    for name in names:
        (directory / name).touch()
    for name, text in texts.items():
        (directory / name.replace("__", ".")).write_text(text)
    return directory


class TestDirectory:
    def test_weights_are_all_that_is_needed(self, tmp_path: Path) -> None:
        assert ensure_weights(str(_fill(tmp_path, "model.safetensors"))) == tmp_path

    @pytest.mark.parametrize("names", [[], ["pytorch_model.bin"], ["training_args.safetensors", "x.args.safetensors"]])
    def test_without_weights_it_is_refused(self, tmp_path: Path, names: list[str]) -> None:
        with pytest.raises(ConfigError, match=r"no \*\.safetensors files"):
            ensure_weights(str(_fill(tmp_path, *names)))

    def test_pickled_weights_are_taken_where_the_config_allows_them(self, tmp_path: Path) -> None:
        assert ensure_weights(str(_fill(tmp_path, "pytorch_model.bin")), allow_pickle=True) == tmp_path
        with pytest.raises(ConfigError, match="safetensors or"):
            ensure_weights(str(_fill(tmp_path / "..", "unrelated")), allow_pickle=True)

    def test_a_part_that_the_index_names_and_is_missing_is_told(self, tmp_path: Path) -> None:
        _fill(tmp_path, "model-1.safetensors", model__safetensors__index__json=INDEX)
        with pytest.raises(ConfigError, match=r"lacks model-2\.safetensors"):
            ensure_weights(str(tmp_path))
        assert ensure_weights(str(_fill(tmp_path, "model-2.safetensors"))) == tmp_path

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": ["a"]}'])
    def test_an_index_that_is_none_is_told(self, tmp_path: Path, text: str) -> None:
        _fill(tmp_path, "model-1.safetensors", model__safetensors__index__json=text)
        with pytest.raises(ConfigError, match="is no index of weights"):
            ensure_weights(str(tmp_path))

    @pytest.mark.parametrize("others", [[], ["config.json"]])
    def test_an_adapter_is_refused_by_name(self, tmp_path: Path, others: list[str]) -> None:
        _fill(tmp_path, "adapter_config.json", "adapter_model.safetensors", *others)
        with pytest.raises(ConfigError, match=f"{tmp_path} is an adapter"):
            ensure_weights(str(tmp_path))

    def test_a_model_beside_an_adapter_is_served_with_a_warning(self, tmp_path: Path, caplog) -> None:
        _fill(tmp_path, "adapter_config.json", "adapter_model.safetensors", "config.json", "model.safetensors")
        assert ensure_weights(str(tmp_path)) == tmp_path
        (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
        assert "without the adapter" in record.getMessage()


class _Hub(BaseHTTPRequestHandler):
    """As much of a hub as its client asks for: the list of a repository's files, and each of them."""

    protocol_version = "HTTP/1.1"
    repositories: Mapping[str, Mapping[str, bytes]]
    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        for model_id, files in self.repositories.items():
            if self.path.startswith(f"/api/models/{model_id}/tree/"):
                tree = [
                    {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                    for name, body in files.items()
                ]
                return self._send(json.dumps(tree).encode(), {"Content-Type": "application/json"}, with_body)
            if self.path.split("?")[0].startswith(f"/api/models/{model_id}"):
                siblings = [{"rfilename": name} for name in files]
                body = json.dumps({"id": model_id, "sha": COMMIT, "siblings": siblings}).encode()
                return self._send(body, {"Content-Type": "application/json"}, with_body)
            for name, body in files.items():
                if self.path in (f"/{model_id}/resolve/{revision}/{name}" for revision in ("main", "v1", COMMIT)):
                    if with_body:
                        self.asked.append(name)
                    etag = hashlib.sha256(body).hexdigest()
                    return self._send(body, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}, with_body)
        return self._send(b"", {"X-Error-Code": "RepoNotFound"}, with_body, status=404)

    def _send(self, body: bytes, headers: Mapping[str, str], with_body: bool, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


WHOLE = {
    "config.json": b"{}",
    "tokenizer.json": b'{"tokenizer": 1}',
    "tokenizer.model": b"t",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "model.safetensors.index.json": INDEX.encode(),
    "model-1.safetensors": b"1",
    "model-2.safetensors": b"2",
    "consolidated.safetensors": b"twice",
    "training_args.bin": b"b",
    "original/weights.safetensors": b"o",
    "onnx/config.json": b"{}",
    "modeling_own.py": b"",
    "README.md": b"#",
}
NEEDED = {
    "config.json",
    "tokenizer.json",
    "tokenizer.model",
    "chat_template.jinja",
    "additional_chat_templates/tools.jinja",
    "model.safetensors.index.json",
    "model-1.safetensors",
    "model-2.safetensors",
}
REPOSITORIES = {
    "some/model": WHOLE,
    "some/small": {"config.json": b"{}", "weights.safetensors": b"1", "training.safetensors": b"no"},
    "some/adapter": {"adapter_config.json": b"{}", "adapter_model.safetensors": b"1"},
    "some/pickled": {"config.json": b"{}", "pytorch_model.bin": b"1"},
}

SCRIPT = """
import os, sys
from pagedkv.integration.serve.weights import ConfigError, ensure_weights
for model_id in sys.argv[1:]:
    try:
        print(ensure_weights(model_id, allow_pickle=model_id == "some/pickled" and "ALLOW" in os.environ).name)
    except ConfigError as error:
        print(error)
"""


class _Client:
    """Programs that know one hub alone, which is on this machine."""

    def __init__(self, port: int, cache: Path, asked: list[str]) -> None:
        self.asked = asked
        """Files that were fetched."""
        self._variables = {
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{port}",
            "HUGGINGFACE_HUB_CACHE": str(cache),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_ENABLE_HF_TRANSFER": "1",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "*",
        }

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env={**self._variables, **variables}, capture_output=True, text=True)

    def ensure(self, *model_ids: str, **variables: str) -> list[str]:
        """A line for each: the folder's name, or why there is none."""
        done = self.run(sys.executable, "-W", "ignore::FutureWarning", "-c", SCRIPT, *model_ids, **variables)
        assert done.stderr == ""
        return done.stdout.splitlines()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[_Client]:
    asked: list[str] = []
    handler = type("Hub", (_Hub,), {"repositories": REPOSITORIES, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield _Client(server.server_port, tmp_path, asked)
    server.shutdown()
    thread.join()
    server.server_close()


class TestHub:
    def test_launcher_s_command_fetches_what_index_and_tokenizer_need_once(
        self, client: _Client, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        shim = write_shim(tmp_path_factory.mktemp("shim"), sys.executable)
        flags = ("--extension", ".safetensors", "--logger-level", "INFO", "--json-output", "--merge-lora")
        done = client.run(shim, "download-weights", "some/model", *flags, "--revision", "v1")
        assert (done.returncode, done.stderr) == (0, "")
        *_, warning = map(json.loads, done.stdout.splitlines())
        assert warning["text"].endswith("run: pagedkv export-chat-template some/model")
        assert sorted(client.asked) == sorted(NEEDED)
        snapshot = tmp_path / "models--some--model" / "snapshots" / COMMIT
        assert {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()} == NEEDED
        assert client.ensure("some/model") == [COMMIT]
        assert sorted(client.asked) == sorted(NEEDED)
        assert client.ensure("some/model", HF_HUB_OFFLINE="1", HF_ENDPOINT=NOBODY) == [COMMIT]
        assert client.ensure("some/model", HF_ENDPOINT=NOBODY) == [COMMIT]

    def test_a_cache_without_the_model_can_not_replace_a_hub_that_is_out_of_reach(self, client: _Client) -> None:
        for variables in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": NOBODY}):
            (line,) = client.ensure("some/model", **variables)
            assert line.startswith("some/model is no directory here, can't be downloaded (")

    def test_without_an_index_weights_are_told_by_their_names(self, client: _Client) -> None:
        assert client.ensure("some/small") == [COMMIT]
        assert sorted(client.asked) == ["config.json", "weights.safetensors"]

    def test_what_can_not_be_served_is_refused_before_it_is_fetched(self, client: _Client) -> None:
        adapter, pickled, unknown = client.ensure("some/adapter", "some/pickled", "no/model")
        assert adapter.startswith("some/adapter is an adapter")
        assert pickled.startswith("some/pickled has no *.safetensors files")
        assert unknown.startswith("no/model is no directory here, and can't be downloaded: 404")
        assert client.asked == ["config.json"]
        assert client.ensure("some/pickled", ALLOW="pickle") == [COMMIT]
        assert client.asked == ["config.json", "pytorch_model.bin"]
