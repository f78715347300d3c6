"""docs/trust.md: at most 25 promises, each with tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES = (ROOT / "docs" / "trust.md").read_text().splitlines()
MOST = 25
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if line.startswith("|")]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_each_promise_has_tests():
    heading, rule, *promises = ROWS
    assert heading == ["promise", "tests that hold it"]
    assert rule == ["---", "---"]
    assert 20 <= len(promises) <= MOST
    for promise, tests in promises:
        assert promise.endswith("."), promise
        assert re.fullmatch(rf"{NAMED.pattern}(, {NAMED.pattern})*", tests), promise


def test_the_tests_that_are_named_exist():
    named = NAMED.findall("\n".join(LINES))
    assert len(named) > 30
    assert len(named) == "\n".join(LINES).count("`tests/")
    for path, name in named:
        text = (ROOT / path).read_text()
        assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE), f"{path}::{name}"
