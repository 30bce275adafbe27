"""How tests are bundled for the workers."""

from __future__ import annotations

import pytest
from longest_first import Units

UNITS = Units(
    {
        "tests/shared/": 9.0,
        "tests/a/test_spread.py::*": 2.0,
        "tests/a/test_split.py::test_long[one]": 5.0,
        "tests/a/test_split.py::TestLong": 4.0,
        "tests/a/test_split.py": 1.0,
    }
)


@pytest.mark.parametrize(
    ("nodeid", "unit", "seconds"),
    [
        ("tests/shared/deep/test_x.py::test_y", "tests/shared/", 9.0),
        ("tests/a/test_spread.py::test_y[a/b::c]", "tests/a/test_spread.py::test_y[a/b::c]", 2.0),
        ("tests/a/test_split.py::test_long[one]", "tests/a/test_split.py::test_long[one]", 5.0),
        ("tests/a/test_split.py::test_long[two]", "tests/a/test_split.py", 1.0),
        ("tests/a/test_split.py::TestLong::test_y", "tests/a/test_split.py::TestLong", 4.0),
        ("tests/a/test_new.py::test_y", "tests/a/test_new.py", float("inf")),
    ],
)
def test_narrowest_listed_name_is_the_unit(nodeid: str, unit: str, seconds: float) -> None:
    assert (UNITS.name_of(nodeid), UNITS.expected_s(unit)) == (unit, seconds)
