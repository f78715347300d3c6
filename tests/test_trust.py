"""docs/trust.md: each fault has a promise, and the tests that it names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "trust.md").read_text()
FAULTS = 21


def test_each_fault_has_a_row():
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)
    ]
    assert [int(row[0]) for row in rows][:FAULTS] == list(range(1, FAULTS + 1))
    for row in rows:
        assert len(row) == 4
        assert all(row)
        assert re.search(r"`tests/[\w/]+\.py", row[3]) or row[3] == "not kept yet, so nothing tests it"


def test_the_tests_that_are_named_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)
    assert len(named) > 30
    for path, name in named:
        text = (ROOT / path).read_text()
        assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE), f"{path}::{name}"
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", PAGE):
        assert f"def {name}(" in tests, name
