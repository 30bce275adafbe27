"""A tokenizer of a hundred ids that a router and a server share through one file."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS = "</s>"
EOS_ID = 0
_MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("a", "n"), ("o", "n"), ("Ġ", "a"), ("0", "1")]


def make_tokenizer() -> Tokenizer:
    """Printable ASCII, a token a character, but for some pairs: text that a model made of "t" and "h" comes back as one
    token, so that an answer's next piece is shorter than what was generated."""
    characters = ["Ġ", "Ċ", *map(chr, range(33, 127))]
    vocab = {EOS: EOS_ID} | {character: index + 1 for index, character in enumerate(characters)}
    for first, second in _MERGES:
        vocab[first + second] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """As the files of a checkpoint."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
