"""Sets up logging: as text, or as one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any, TextIO


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON, in the form that text-generation-inference's launcher reads.

    `{"text": …, "record": {"time": …, "level": {"name": …}, "name": …, "extra": …}}`; `extra` has the fields of a
    structured line, such as that of an ended request.

    Args:
        origin: prefix of each message, for several processes that write to one place: "rank 1: ".
    """

    def __init__(self, origin: str = "") -> None:
        super().__init__(origin.replace("%", "%%") + "%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": {"name": record.levelname},
            "name": record.name,
            "extra": getattr(record, "fields", {}),
        }
        return json.dumps({"text": super().format(record), "record": facts})


def set_up_logging(level: str, origin: str = "", *, as_json: bool = False, stream: TextIO | None = None) -> None:
    """Logs our own messages from `level` on, and those of libraries from WARNING on.

    Args:
        origin: as in `JsonFormatter`.
        stream: where to write; None is standard error.
    """
    text_format = f"%(asctime)s %(levelname)s {origin.replace('%', '%%')}%(name)s: %(message)s"
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(origin) if as_json else logging.Formatter(text_format))
    logging.basicConfig(handlers=[handler], level="WARNING", force=True)
    logging.getLogger("pagedkv").setLevel(level)
