"""The name under which a model is served where the config gives none."""

from __future__ import annotations

from pathlib import Path


def default_model_name(model_path: str) -> str:
    """The name of a directory; a name on the hub is itself.

    >>> default_model_name("/models/tiny/"), default_model_name("org/name-without-such-a-folder")
    ('tiny', 'org/name-without-such-a-folder')
    """
    return (
        model_path
        if not model_path.startswith(("/", ".", "~")) and not Path(model_path).is_dir()
        else (Path(model_path).name or Path(model_path).absolute().name)
    )
