"""Hides progress bars of other libraries, as of transformers while it reads a model."""

from __future__ import annotations

import os

HIDING_VARIABLES = ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")
"""Read by huggingface_hub, transformers and tqdm when they are imported. Bars of our own are not affected: they say
`disable=` themselves."""

SHOWING_VARIABLE = "PAGEDKV_LOG_LEVEL"


def hide_progress_bars() -> None:
    """Hides bars in this process and its children. Call it before the libraries are imported.

    With PAGEDKV_LOG_LEVEL=DEBUG in the environment it hides none.
    """
    if os.environ.get(SHOWING_VARIABLE, "").upper() == "DEBUG":
        return
    for variable in HIDING_VARIABLES:
        os.environ.setdefault(variable, "1")
