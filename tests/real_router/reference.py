"""What a model answers, computed by transformers alone, and what a router makes of long answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_PIECE_TOKENS = 1024
"""A router asks its server for no more tokens at once."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""At the end of a text it stands for an incomplete character, which no answer holds."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """A long answer, which a router puts together of several."""

    token_ids: list[int]
    text: str
    num_pieces: int


class Reference:
    """Greedy answers of one checkpoint in float32."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.greedy = lru_cache(maxsize=None)(self._greedy)

    def _greedy(self, prompt: str, num_tokens: int) -> tuple[int, ...]:
        """The tokens that follow the prompt; fewer where the model ends its answer."""
        return tuple(self.continue_ids(self.tokenizer.encode(prompt), num_tokens))

    def continue_ids(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        with torch.inference_mode():
            ids = self._model.generate(
                torch.tensor([list(prompt_ids)]),
                attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
                max_new_tokens=num_tokens,
                do_sample=False,
            )
        found: list[int] = ids[0, len(prompt_ids) :].tolist()
        return found

    def share_of_top_tokens(self, prompt: str, answer_ids: Sequence[int]) -> float:
        """How many of the tokens are the likeliest after those before them: 1 for a greedy answer without rounding."""
        prompt_ids = self.tokenizer.encode(prompt)
        ids = torch.tensor([[*prompt_ids, *answer_ids]])
        with torch.inference_mode():
            best = self._model(ids).logits[0, len(prompt_ids) - 1 : -1].argmax(-1)
        return (best == torch.tensor(list(answer_ids))).float().mean().item()

    def pieces(self, prompt: str, num_tokens: int, max_total_tokens: int) -> Pieces:
        """The answer to a request of so many tokens.

        The router asks for each piece with the text so far as a prompt, which need not give the same tokens again. It
        goes on until it has the tokens asked for, and each piece may have as many as the first: so there may be more
        in the end. A prompt that leaves no room for another piece ends the answer.
        """
        piece_tokens = min(num_tokens, MAX_PIECE_TOKENS)
        token_ids: list[int] = []
        text, num_pieces = "", 0
        while len(token_ids) < num_tokens:
            prompt_ids = self.tokenizer.encode(prompt + text)
            if len(prompt_ids) + piece_tokens > max_total_tokens:
                break
            found = self.continue_ids(prompt_ids, piece_tokens)
            token_ids += found
            text += self.tokenizer.decode(found, skip_special_tokens=True).rstrip(REPLACEMENT)
            num_pieces += 1
            if len(found) < piece_tokens:
                break
        return Pieces(token_ids, text, num_pieces)
