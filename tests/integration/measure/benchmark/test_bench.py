"""`pagedkv bench` as a whole, with a tiny model and a peer that computes nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pagedkv.integration.measure.benchmark.engines import PeerOptions, make_backend_spec, make_peer_spec, split_names
from pagedkv.integration.measure.benchmark.experiment import BenchmarkOptions, plan_experiment
from pagedkv.integration.measure.benchmark.runners import in_process
from pagedkv.integration.measure.benchmark.runners.protocol import run_once
from pagedkv.integration.measure.benchmark.workloads import ALL_AT_ONCE, draw_workload
from pagedkv.plugin.errors import ConfigError

Command = Callable[..., Any]

QUICK = ("--scale", 1 / 64, "--kv-memory", "1MiB", "--set", "scheduler.max_step_tokens=256")


@pytest.mark.slow
def test_backend_and_peer_run_side_by_side(pagedkv: Command, tiny_model: Path, fake_peer: str, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("page.html", "tables.md", "picture.svg")]
    outcome = pagedkv(
        *("bench", tiny_model, "--workload", "short,stream", "--backend", "paged"),
        *("--peer", f"fake={fake_peer} well", "--repeat", 2, *QUICK),
        *("--html", files[0], "--markdown", files[1], "--plot", files[2], "--json"),
    )
    assert outcome.code == 0, outcome.err
    report = json.loads(outcome.out)
    assert list(report["workloads"]) == ["short", "stream-128", "stream-3072"]
    for engines in report["workloads"].values():
        assert list(engines) == ["paged", "fake"]
        for name, figures in engines.items():
            assert len(figures["seconds"]) == 2
            assert (figures["seconds"] == [2.0, 2.0]) == (name == "fake")
            assert figures["ttft_s"]["p50"] <= figures["ttft_s"]["p90"] <= figures["ttft_s"]["p99"]
    fake = report["workloads"]["short"]["fake"]
    assert (fake["new_tokens"], fake["tokens_per_s"], fake["prefix_hit_rate"]) == (32, 16.0, 0.5)
    assert report["engines"]["fake"]["dtype"] == "float32"
    assert report["engines"]["fake"]["kv_bytes"] == 2**20
    assert report["machine"]["cores"] >= 1
    page, tables, picture = (file.read_text() for file in files)
    assert "<svg" in page
    assert "| short | 32 × (2 → 1) | s |" in tables
    assert ElementTree.fromstring(picture).tag.endswith("svg")


def test_capacity_has_a_budget_of_its_own_in_which_the_contiguous_backend_holds_eight(tiny_model: Path) -> None:
    options = BenchmarkOptions(
        tiny_model, ["short", "capacity"], ["paged", "contiguous"], peers=["transformers"], scale=1 / 64
    )
    large, small = plan_experiment(options).rounds
    assert [spec.name for spec in large.engines] == ["paged", "contiguous", "transformers"]
    assert [spec.name for spec in small.engines] == ["paged", "contiguous"]
    held = {}
    for spec in small.engines:
        engine = in_process.load(json.loads(spec.command[-1]))
        requests = draw_workload(small.shapes[0], ALL_AT_ONCE, range(1000), seed=0, repetition=0)
        held[spec.name] = run_once(engine, requests)["cache"]["peak_running"]
        engine.close()
    assert held == {"paged": 64, "contiguous": 8}


def test_table_is_printed_where_json_goes_to_a_file(
    pagedkv: Command, tiny_model: Path, fake_peer: str, tmp_path: Path
) -> None:
    outcome = pagedkv(
        *("bench", tiny_model, "--workload", "mixed", "--backend", "none", "--repeat", 1, *QUICK),
        *("--rate", 8, "--bursts", 4, "--peer", f"fake={fake_peer} well", "--json", tmp_path / "out.json"),
    )
    assert outcome.code == 0, outcome.err
    assert "mixed" in outcome.out
    assert "1.0 MiB" in outcome.out
    assert "fake 1 (" in outcome.out
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["settings"]["arrivals"] == "bursts of 4, 8 requests/s"


def test_peer_that_fails_ends_the_run_with_its_last_words(pagedkv: Command, tiny_model: Path, fake_peer: str) -> None:
    for behaviour, words in (("no-start", "there is no libfoo"), ("crash", "out of memory, says the fake")):
        outcome = pagedkv(
            *("bench", tiny_model, "--workload", "short", "--backend", "none", *QUICK),
            *("--peer", f"fake={fake_peer} {behaviour}"),
        )
        assert outcome.code == 2
        assert words in outcome.err
        assert outcome.out == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--workload", "chat"), "there is no workload 'chat'"),
        (("--workload", "short,long"), "was made for 256"),
        (("--backend", "padded", *QUICK), "padded"),
        (("--through", "http", *QUICK), "--through takes process, tgi, smg"),
        (("--variant", "model.decoder=off", *QUICK), "--variant takes NAME:KEY=VALUE"),
        (("--variant", "a:model.decoder=off", "--variant", "a:model.threads=1", *QUICK), "each NAME once"),
        (("--variant", "a:model.dekoder=off", *QUICK), "did you mean model.decoder"),
        (("--variant", "tgi:model.decoder=off", "--through", "process,tgi", *QUICK), "named paged-tgi"),
        (("--peer", "vllm", *QUICK), "--peer vllm=PATH/bin/python"),
        (("--peer", "sglang", *QUICK), "there is no peer 'sglang'"),
        (("--peer", "openvino=python", *QUICK), "--peer-model openvino=PATH"),
        (("--peer-model", "openvino", *QUICK), "--peer-model takes NAME=PATH"),
        (("--bursts", 4, *QUICK), "--rate"),
        (("--backend", "none", *QUICK), "no engine to run"),
        (("--kv-memory", "auto", *QUICK[:2]), "--kv-memory"),
        (("--plot", "/nowhere/plot.png", *QUICK), "can't be written"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    pagedkv: Command, tiny_model: Path, flags: tuple[str, ...], message: str
) -> None:
    outcome = pagedkv("bench", tiny_model, *flags)
    assert outcome.code == 2
    assert message in " ".join(outcome.err.split())


def test_variants_take_turns_with_what_they_differ_from(pagedkv: Command, tiny_model: Path) -> None:
    outcome = pagedkv(
        *("bench", tiny_model, "--workload", "short", "--backend", "paged", "--repeat", 1, *QUICK),
        *("--variant", "off:model.decoder=off model.dtype=bfloat16", "--json"),
    )
    assert outcome.code == 0, outcome.err
    report = json.loads(outcome.out)
    assert list(report["workloads"]["short"]) == ["paged", "paged-off"]
    assert [report["engines"][name]["dtype"] for name in ("paged", "paged-off")] == ["float32", "bfloat16"]


def test_engines_are_started_by_the_interpreter_that_is_named(tmp_path: Path) -> None:
    options = PeerOptions(tmp_path / "model", {"openvino": "file.gguf"}, "bfloat16", 2**30, 4096)
    vllm = make_peer_spec("vllm=/venvs/vllm/bin/python", options)
    assert vllm.command[:4] == ["/venvs/vllm/bin/python", "-m", "runners", "vllm"]
    assert json.loads(vllm.command[4]) == {
        "model": str(tmp_path / "model"),
        "dtype": "bfloat16",
        "kv_bytes": 2**30,
        "max_total_tokens": 4096,
    }
    assert json.loads(make_peer_spec("openvino=python", options).command[4])["model"] == "file.gguf"
    assert make_peer_spec("transformers", options).command[0] == sys.executable
    ours = make_backend_spec("paged", "tgi", Path("my.toml"), {"cache.memory": "1GiB"})
    assert ours.name == "paged-tgi"
    assert json.loads(ours.command[4]) == {
        "config_file": str(Path("my.toml").absolute()),
        "overrides": {"cache.memory": "1GiB", "backend": "paged"},
    }
    with pytest.raises(ConfigError, match="NAME=COMMAND"):
        make_peer_spec("mine", options)


def test_names_may_stand_in_one_option_or_in_several() -> None:
    assert split_names(["a, b", "b,c", ""]) == ["a", "b", "c"]
    assert split_names(None) == []
