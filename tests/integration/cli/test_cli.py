"""The command line, against a real server where a command talks to one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from pagedkv.integration import progress_bars
from pagedkv.integration.measure import extra
from pagedkv.integration.serve.child_process import ChildServer, command_path
from pagedkv.kernels.cpu import measured_choice
from pagedkv.plugin.config import list_config_keys
from pagedkv.plugin.registry import GROUPS

PROMPT = "The capital of France is"
LONG_PROMPT = "A paged cache keeps keys and values in blocks of a few tokens each. " * 8

Command = Callable[..., object]


def _events(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def test_help_needs_none_of_the_heavy_libraries() -> None:
    check = "import sys, pagedkv.integration.cli.main; print({'torch', 'transformers', 'grpc'} & set(sys.modules))"
    # -I as PYTHONSAFEPATH, which Python 3.10 does not know.
    done = subprocess.run([sys.executable, "-I", "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_help_names_every_command(pagedkv) -> None:
    outcome = pagedkv("--help")
    assert outcome.code == 0
    assert all(name in outcome.out for name in ("serve", "generate", "demo-model", "plugins", "config"))


def test_demo_model_prints_the_directory_that_is_cached(pagedkv, demo_model: Path) -> None:
    assert pagedkv("demo-model").out.strip() == str(demo_model)
    assert json.loads(pagedkv("demo-model", "--json").out) == {"directory": str(demo_model)}


def test_demo_model_never_replaces_what_is_not_its_own(pagedkv, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    outcome = pagedkv("demo-model", tmp_path)
    assert outcome.code == 2
    assert "is not the demo model" in outcome.err
    assert (tmp_path / "mine.txt").read_text() == "keep me"


def test_plugins_lists_every_entry_point_with_its_distribution(pagedkv) -> None:
    listed = json.loads(pagedkv("plugins", "--json").out)
    assert {(one["group"], one["name"]) for one in listed} == {
        (group.name, point.name) for group in GROUPS for point in entry_points(group=group.name)
    }
    assert all(one["loads"] for one in listed)
    assert {one["distribution"].split()[0] for one in listed} == {"pagedkv"}


def test_plugins_shows_what_was_measured(pagedkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_choice, "cache_dir", lambda: tmp_path)
    assert "Measured" not in pagedkv("plugins").out
    measured_choice.measured_table("attention of a shape", lambda: {"a prompt": {"vectors": 0.002, "tiles": 0.001}})
    assert "attention of a shape" in pagedkv("plugins").out
    assert "a prompt: vectors 2.000, tiles 1.000* ms" in pagedkv("plugins").out


def test_plugins_says_why_one_does_not_load(pagedkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "broken_thing-3.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-thing\nVersion: 3.1\n")
    (metadata / "entry_points.txt").write_text("[pagedkv.schedulers]\nbroken = no_such_module:Scheduler\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (broken,) = (one for one in json.loads(pagedkv("plugins", "--json").out) if one["name"] == "broken")
    assert broken["distribution"] == "broken-thing 3.1"
    assert not broken["loads"]
    assert "no_such_module" in broken["problem"]
    assert "does not load" in pagedkv("plugins").out


def test_config_shows_file_under_environment_under_flags(pagedkv, tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "pagedkv.toml"
    file.write_text("[cache]\nblock_size = 32\novercommit = 2.0\n[scheduler]\nmax_step_tokens = 64\n")
    monkeypatch.setenv("PAGEDKV_CACHE_OVERCOMMIT", "3")
    monkeypatch.setenv("PAGEDKV_SCHEDULER_MAX_STEP_TOKENS", "128")
    shown = json.loads(pagedkv("config", "-c", file, "--set", "scheduler.max_step_tokens=256", "--json").out)
    assert set(shown) == {key.path for key in list_config_keys()}
    assert (shown["cache.block_size"], shown["cache.overcommit"]) == (32, 3.0)
    assert shown["scheduler.max_step_tokens"] == 256


def test_config_prints_a_table(pagedkv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = pagedkv("config").out
    assert all(key.path in out for key in list_config_keys())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "cache.blok_size=16"], "did you mean cache.block_size"),
        (["--set", "cache.block_size=12"], "power of two"),
        (["--set", "nonsense"], "KEY=VALUE"),
        (["--config", "no-such-file.toml"], "no-such-file.toml"),
        (["--backend", "pagd"], "did you mean 'paged'"),
        (["--set", "limits.max_total_tokens=100000"], "8192"),
        (["--kv-cache-dtype", "int3"], "unknown KV dtype"),
        (["--listen", "nowhere"], "HOST:PORT"),
        (["--uds-path", "/no/such/folder/socket"], "does not exist"),
    ],
)
def test_serve_explains_a_bad_config_and_exits_with_2(pagedkv, demo_model: Path, arguments, message) -> None:
    outcome = pagedkv("serve", demo_model, "--set", "cache.num_blocks=16", *arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err


def test_serve_explains_a_directory_without_a_model(pagedkv, tmp_path: Path) -> None:
    outcome = pagedkv("serve", tmp_path)
    assert outcome.code == 2
    assert "config.json" in outcome.err


def test_generate_streams_text_and_tells_the_cost(pagedkv, server: ChildServer) -> None:
    outcome = pagedkv("generate", "--target", server.target, "--max-new-tokens", 6, PROMPT)
    assert outcome.code == 0
    assert "Paris" in outcome.out
    assert "6 tokens (length)" in outcome.err


def test_generate_in_json_streams_tokens_that_add_up_to_the_text(pagedkv, server: ChildServer) -> None:
    outcome = pagedkv("generate", "--target", server.target, "--max-new-tokens", 6, "--json", PROMPT)
    *tokens, end = _events(outcome.out)
    assert [one["event"] for one in tokens] == ["token"] * 6
    assert "".join(one["text"] for one in tokens) == end["text"]
    assert end["finish_reason"] == "length"


def test_generate_shows_the_prefix_hit_of_a_second_equal_prompt(pagedkv, server: ChildServer) -> None:
    command = ("generate", "--target", server.target, "--max-new-tokens", 2, "--json", LONG_PROMPT)
    first, second = (_events(pagedkv(*command).out)[-1] for _ in range(2))
    assert first["num_cached_tokens"] == 0
    assert second["num_cached_tokens"] >= 64
    assert second["text"] == first["text"]


def test_generate_repeats_a_sampled_answer_by_its_seed(pagedkv, server: ChildServer) -> None:
    def sample(seed: int) -> str:
        flags = ("--temperature", 1.5, "--seed", seed, "--max-new-tokens", 12, "--json")
        return _events(pagedkv("generate", "--target", server.target, *flags, "Once").out)[-1]["text"]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_generate_applies_the_chat_template(pagedkv, server: ChildServer, demo_model: Path) -> None:
    flags = ("--chat", demo_model, "--system", "You answer with one word.", "--max-new-tokens", 40)
    outcome = pagedkv("generate", "--target", server.target, *flags, "Say hello.")
    assert outcome.code == 0
    assert "<|im_" not in outcome.out
    assert "eos_token" in outcome.err or "length" in outcome.err


def test_generate_stops_at_a_stop_string(pagedkv, server: ChildServer) -> None:
    flags = ("--stop", "Paris", "--max-new-tokens", 20, "--json")
    end = _events(pagedkv("generate", "--target", server.target, *flags, PROMPT).out)[-1]
    assert end["finish_reason"] == "stop_sequence"
    assert end["text"].endswith("Paris")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--max-new-tokens", 0], 2, "max_new_tokens"),
        (["--system", "Be kind."], 2, "--chat"),
    ],
)
def test_generate_explains_a_bad_request(pagedkv, server: ChildServer, arguments, code, message) -> None:
    outcome = pagedkv("generate", "--target", server.target, *arguments, PROMPT)
    assert (outcome.code, message in outcome.err) == (code, True), outcome.err


def test_generate_explains_what_the_server_refuses(pagedkv, server: ChildServer) -> None:
    outcome = pagedkv("generate", "--target", server.target, LONG_PROMPT * 20)
    assert outcome.code == 1
    assert outcome.err.startswith("pagedkv: ")
    assert "the limit is 2047" in outcome.err


def test_generate_explains_that_nobody_answers(pagedkv, tmp_path: Path) -> None:
    outcome = pagedkv("generate", "--target", f"unix:{tmp_path}/nobody", PROMPT)
    assert outcome.code == 1
    assert outcome.err.startswith("pagedkv: ")


def test_ctrl_c_in_generate_ends_the_request_on_the_server(server: ChildServer) -> None:
    log_before = server.log.read_text()
    flags = ["--target", server.target, "--ignore-eos", "--max-new-tokens", "1900", "--json"]
    with subprocess.Popen(
        [command_path(), "generate", *flags, "Tell me a very long story."], stdout=subprocess.PIPE, env=os.environ
    ) as client:
        assert client.stdout is not None
        assert b'"token"' in client.stdout.readline()
        client.send_signal(signal.SIGINT)
        assert client.wait(timeout=30) == 130
    deadline_s = time.monotonic() + 5
    while "aborted" not in (since := server.log.read_text()[len(log_before) :]):
        assert time.monotonic() < deadline_s, f"the request still runs; the log says: {since}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "command",
    [
        ("bench",),
        ("eval-kv", "model"),
        ("calibrate", "model", "--kv-dtype", "int8", "--output", "scales.safetensors"),
        ("plan", "model", "--plot", "plan.png"),
    ],
    ids=lambda command: command[0],
)
def test_measuring_without_its_extra_says_what_to_install(
    pagedkv, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extra, "find_spec", lambda name: None)
    outcome = pagedkv(*command)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.count("\n") == 1
    assert 'pip install "pagedkv[bench]"' in outcome.err


def test_every_command_hides_bars_of_other_libraries(pagedkv) -> None:
    pagedkv("plugins")
    assert all(os.environ[name] == "1" for name in progress_bars.HIDING_VARIABLES)
