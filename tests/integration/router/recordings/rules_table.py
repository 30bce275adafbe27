"""The table of rules and of the recordings in which each was seen."""

from __future__ import annotations

from collections.abc import Mapping

from .rules import RULES, Tally

_HEAD = """# What is always true of the router's calls

Text-generation-router 3.3.6, unmodified, in front of this server. Made by `rules_table.py` of the recordings in
`traces/`, each of which keeps every rule; "seen" are those that could have broken it.

| rule | what | seen |
|---|---|---|
"""


def make_rules_table(tallies: Mapping[str, Tally]) -> str:
    """Markdown.

    Args:
        tallies: by the name of a recording.
    """
    return _HEAD + "".join(f"| {rule} | {text} | {_seen(rule, tallies)} |\n" for rule, text in RULES.items())


def _seen(rule: str, tallies: Mapping[str, Tally]) -> str:
    seen = [name for name, tally in sorted(tallies.items()) if tally.num_checks[rule]]
    unseen = sorted(set(tallies) - set(seen))
    if len(unseen) < len(seen) / 2:
        return f"all but {', '.join(unseen)}" if unseen else "all"
    return ", ".join(seen)
