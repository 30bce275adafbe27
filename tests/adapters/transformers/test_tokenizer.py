"""Text to ids and back, as exact as the byte-level tokenizer of the demo model is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pagedkv.adapters.transformers.paged_model import TransformersModel
from pagedkv.adapters.transformers.tokenizer import TransformersTokenizer
from pagedkv.plugin.errors import ConfigError, RequestError
from pagedkv.plugin.interface import Tokenizer
from pagedkv.plugin.resolved_config import ModelSettings


def settings_of(path: Path) -> ModelSettings:
    return ModelSettings(str(path), "transformers", "", trust_remote_code=False, allow_pickle=False)


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> TransformersTokenizer:
    return TransformersModel.load_tokenizer(settings_of(demo_model))


@pytest.mark.parametrize(
    "text",
    ["", "Hello , world .", "  two  spaces  ", "do n't clean 's up", "naïve 🦙 日本語\n\ttab", "<|im_start|>user\nhi"],
)
def test_decoding_gives_the_text_back_exactly(tokenizer: TransformersTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_incomplete_character_comes_out_as_the_replacement_character(tokenizer: TransformersTokenizer) -> None:
    token_ids = tokenizer.encode("🦙")
    assert len(token_ids) > 1
    assert tokenizer.decode(token_ids[:1]) == "\ufffd"


def test_every_token_that_decoding_skips_as_special_is_listed_as_special(tokenizer: TransformersTokenizer) -> None:
    assert set(tokenizer.all_special_ids) == set(range(17))
    for token_id in range(40):
        assert (tokenizer.decode([token_id], skip_special_tokens=True) == "") == (token_id in tokenizer.all_special_ids)


def test_special_tokens_are_kept_unless_skipped(tokenizer: TransformersTokenizer) -> None:
    assert tokenizer.decode([1, 28120, 2]) == "<|im_start|>hi<|im_end|>".replace("hi", tokenizer.decode([28120]))
    assert tokenizer.decode([1, 28120, 2], skip_special_tokens=True) == tokenizer.decode([28120])


def test_long_texts_are_encoded_whole_and_without_a_warning(
    tokenizer: TransformersTokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    assert len(tokenizer.encode("word " * 20_000)) >= 20_000
    assert capfd.readouterr() == ("", "")


def test_the_chat_template_ends_where_the_answer_begins(tokenizer: TransformersTokenizer) -> None:
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Why?"}])
    assert prompt.endswith("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n")


def test_a_model_without_a_template_refuses_messages(demo_model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, tmp_path)
    tokenizer_config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    tokenizer_config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    tokenizer = TransformersModel.load_tokenizer(settings_of(tmp_path))
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Why?"}])


def test_a_template_that_refuses_the_messages_is_the_requests_fault(demo_model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    tokenizer = TransformersModel.load_tokenizer(settings_of(tmp_path))
    with pytest.raises(RequestError, match="roles must alternate"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Why?"}])


def test_a_directory_without_a_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        TransformersModel.load_tokenizer(settings_of(tmp_path))


def test_fits_the_interface(tokenizer: TransformersTokenizer) -> None:
    assert isinstance(tokenizer, Tokenizer)


def test_decoding_is_the_tokenizer_s_own_without_a_clean_up_whatever_way_it_takes(
    tokenizer: TransformersTokenizer,
) -> None:
    class Other(type(tokenizer._tokenizer)):
        """With a way of its own to decode, which must be the one that is taken."""

        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return super()._decode(*args, **kwargs) + "!"

    other = TransformersTokenizer(Other(tokenizer_object=tokenizer._tokenizer.backend_tokenizer))
    text = "Spaces , before commas .  «Zoë» 🙂<|im_end|>"
    token_ids = tokenizer.encode(text)
    for skip_special_tokens in (False, True):
        expected = tokenizer._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert tokenizer.decode(token_ids, skip_special_tokens) == expected
        assert other.decode(token_ids, skip_special_tokens).endswith("!")
