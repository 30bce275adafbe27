"""Decodes token ids to text incrementally, with stop strings; shared by every protocol adapter and the engine."""

from pagedkv.plugin.text.detokenizer import Detokenizer
from pagedkv.plugin.text.output_text import OutputText
from pagedkv.plugin.text.stop_strings import StopStrings

__all__ = ["Detokenizer", "OutputText", "StopStrings"]
