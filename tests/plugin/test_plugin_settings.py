"""Tables [plugins.NAME]: read with the plugin's own model, passed to what makes it, wrong ones refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from pagedkv.plugin.config import load_config
from pagedkv.plugin.errors import ConfigError
from pagedkv.plugin.plugin_settings import check_table, read_settings
from pagedkv.plugin.registry import check_plugin_tables


class Settings(BaseModel):
    max_wait_s: float = Field(5.0, gt=0, description="Longest wait.")
    names: tuple[str, ...] = ()


class Needy(BaseModel):
    url: str


class Mine:
    settings_model = Settings


class Other:
    settings_model = Needy


class Plain:
    pass


def test_settings_are_read_with_the_plugins_own_model() -> None:
    settings = read_settings("mine", Mine, {"mine": {"max_wait_s": "2.5", "names": ["a"]}, "else": {"x": 1}})
    assert settings == Settings(max_wait_s=2.5, names=("a",))
    assert read_settings("mine", Mine, {}) == Settings()
    assert read_settings("plain", Plain, {}) is None


def test_plugins_of_one_name_share_a_table() -> None:
    table = {"max_wait_s": 1, "url": "x"}
    check_table("mine", [Mine, Other, Plain], table)
    assert read_settings("mine", Mine, {"mine": table}) == Settings(max_wait_s=1)
    assert read_settings("mine", Other, {"mine": table}) == Needy(url="x")


@pytest.mark.parametrize(
    ("plugins", "table", "message"),
    [
        (
            [Mine],
            {"max_wait": 1},
            r"unknown key plugins\.mine\.max_wait; did you mean 'max_wait_s'\? Known: max",
        ),
        ([Mine], {"max_wait_s": 0}, r"plugins\.mine\.max_wait_s: .*greater than 0 \(found 0\)"),
        ([Mine], {"names": 3}, r"plugins\.mine\.names: "),
        ([Other], {}, r"plugins\.mine\.url: Field required$"),
        ([Plain], {"a": 1}, r"'mine' takes no settings: leave out the table \[plugins\.mine\]"),
    ],
)
def test_a_wrong_table_is_refused_and_the_message_says_what_to_change(
    plugins: list[type], table: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_table("mine", plugins, table)


def test_tables_come_from_file_environment_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "pagedkv.toml"
    file.write_text("[plugins.continuous]\nfrom_file = 1\nboth = 1\n[plugins.paged]\nx = 1\n")
    environ = {"PAGEDKV_PLUGINS_CONTINUOUS_BOTH": "2"}
    config = load_config(file, {"plugins.paged.y": "3"}, environ)
    assert config.plugins == {"continuous": {"from_file": 1, "both": "2"}, "paged": {"x": 1, "y": "3"}}


@pytest.mark.parametrize(
    ("text", "environ", "message"),
    [
        ("plugins = 3", {}, r"plugins: .*dictionary"),
        ("[plugins]\ncontinuous = 3", {}, r"plugins\.continuous: .*dictionary"),
        ("", {"PAGEDKV_PLUGINS_NOBODY_X": "1"}, "unknown environment variable PAGEDKV_PLUGINS_NOBODY_X"),
        ("", {"PAGEDKV_PLUGINS_CONTINUOUS_": "1"}, "unknown environment variable"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str, environ: dict[str, str], message: str) -> None:
    file = tmp_path / "pagedkv.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(file, {}, environ)


def test_a_name_that_nothing_installed_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"\[plugins\.continous\]: no plugin .*; did you mean 'continuous'\?"):
        check_plugin_tables({"continous": {"x": 1}})
    with pytest.raises(ConfigError, match="'continuous' takes no settings"):
        check_plugin_tables({"continuous": {"x": 1}})
