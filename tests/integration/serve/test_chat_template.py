"""The chat template where text-generation-inference's router looks for it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedkv.integration.serve.chat_template import (
    export_chat_template,
    find_template_of_router,
    has_hidden_template,
    warn_of_hidden_template,
)
from pagedkv.plugin.errors import ConfigError

TEMPLATE = "{% for message in messages %}{{ 'ä' ~ message.content }}\n{% endfor %}"


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """A directory with chat_template.jinja and files of JSON by name."""

    def make(**files: Any) -> Path:
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        for name, values in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(values))
        return tmp_path

    return make


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template": {"chat_template": "x"}},
        {"tokenizer_config": {"chat_template": [{"name": "default", "template": "x"}]}},
        {"processor_config": {"chat_template": "x", "image_seq_len": 4}},
    ],
)
def test_router_finds_a_template_in_any_of_three_files(make_model, files: dict[str, Any]) -> None:
    directory = make_model(**files)
    (name,) = files
    assert find_template_of_router(directory) == directory / f"{name}.json"
    assert not has_hidden_template(directory, {})


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config": {"bos_token": "<s>"}},
        {"chat_template": ["none"], "processor_config": {"chat_template": "x"}},
    ],
)
def test_router_finds_none(make_model, files: dict[str, Any]) -> None:
    assert find_template_of_router(make_model(**files)) is None


def test_a_model_without_any_template_is_not_warned_of(tmp_path: Path) -> None:
    assert not has_hidden_template(tmp_path, {})


def test_export_writes_a_file_of_its_own_and_leaves_the_others_alone(make_model) -> None:
    directory = make_model(tokenizer_config={"bos_token": "<s>"})
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    written = export_chat_template(directory)
    assert json.loads(written.read_text(encoding="utf-8")) == {"chat_template": TEMPLATE}
    assert find_template_of_router(directory) == written
    assert {path.name: path.read_bytes() for path in directory.iterdir() if path != written} == before
    assert export_chat_template(directory) == written


def test_export_to_a_file_elsewhere_is_a_whole_tokenizer_configuration(make_model, tmp_path_factory) -> None:
    directory = make_model(tokenizer_config={"bos_token": "<s>"})
    file = tmp_path_factory.mktemp("elsewhere") / "tokenizer.json"
    assert export_chat_template(directory, file) == file
    assert json.loads(file.read_text(encoding="utf-8")) == {"bos_token": "<s>", "chat_template": TEMPLATE}
    assert not (directory / "chat_template.json").exists()
    assert has_hidden_template(directory, {})
    assert not has_hidden_template(directory, {"TOKENIZER_CONFIG_PATH": str(file)})


def test_a_file_that_is_there_is_never_replaced(make_model, tmp_path: Path) -> None:
    directory = make_model(chat_template={"something": "else"})
    for output in (None, directory / "chat_template.json"):
        with pytest.raises(ConfigError, match="is left as it is"):
            export_chat_template(directory, output)
    assert json.loads((directory / "chat_template.json").read_text()) == {"something": "else"}


def test_without_a_template_or_a_writable_place_the_reason_is_given(make_model, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="brings no chat template"):
        export_chat_template(tmp_path)
    with pytest.raises(ConfigError, match="--tokenizer-config-path"):
        export_chat_template(make_model(), tmp_path / "no-such-folder" / "file.json")


def test_one_warning_names_the_command_that_cures_it(make_model, caplog: pytest.LogCaptureFixture) -> None:
    directory = make_model()
    with caplog.at_level(logging.INFO):
        warn_of_hidden_template(directory, "some model", {})
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert record.getMessage().endswith("pagedkv export-chat-template 'some model'")
        export_chat_template(directory)
        warn_of_hidden_template(directory, "some model", {})
    assert len(caplog.records) == 1


def test_for_a_directory_that_can_not_be_written_the_warning_names_the_router_s_flag(
    make_model, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    warn_of_hidden_template(make_model(), "m", {})
    assert "--output FILE, and start the launcher with --tokenizer-config-path FILE" in caplog.text


def test_command_prints_the_file_and_explains_what_it_can_not_do(pagedkv, make_model, tmp_path: Path) -> None:
    assert pagedkv("export-chat-template", make_model()).out.strip() == str(tmp_path / "chat_template.json")
    outcome = pagedkv("export-chat-template", "no-such/model")
    assert (outcome.code, outcome.out) == (2, "")
    assert "no-such/model is no directory" in outcome.err


def test_demo_model_has_it(demo_model: Path) -> None:
    holder = find_template_of_router(demo_model)
    assert holder == demo_model / "chat_template.json"
    assert json.loads(holder.read_text())["chat_template"] == (demo_model / "chat_template.jinja").read_text()
