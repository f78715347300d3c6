"""Rows beside papers show ranges over readings, and the table of today's link is what the simulation says."""

import pytest

from bench.memory.link import run
from bench.memory.paper_rows import PaperRow, merged
from bench.tools.results import RESULTS, load
from tests.support.nearly import nearly_equal


def test_figures_of_one_explanation_share_a_row():
    names = ["A, base", "A, all", "B, base", "B 2, base", "total"]
    rows = [PaperRow(name, str(at), {"a": at}, "one" if at < 2 else "two", "{:.0f}") for at, name in enumerate(names)]
    assert merged(rows) == [
        ["A, base<br>all", "0<br>1", "0<br>1", "one"],
        ["B, base<br>B 2, base<br>total", "2<br>3<br>4", "2<br>3<br>4", "two"],
    ]
    assert merged(rows[2:4]) == [["B, base<br>B 2", "2<br>3", "2<br>3", "two"]]


def test_the_link_table_is_what_the_simulation_says():
    found = run(["vgg16"])
    kept = load(RESULTS / "memory" / "link.json")
    assert found["policies"]["vgg16"] == kept["policies"]["vgg16"]
    assert nearly_equal(found["balance"]["vgg16"], kept["balance"]["vgg16"])
    assert not nearly_equal(found["balance"]["vgg16"], kept["balance"]["resnet50"])


@pytest.mark.parametrize(
    ("ours", "text"),
    [
        ({"a": 1.234}, "1.2 ms"),
        ({"a": 3.0, "b": 1.0, "c": 2.0}, "1.0 to 3.0 ms"),
        ({"a": 1.01, "b": 1.02}, "1.0 ms"),
        ({"a": 1.0, "b": None}, "1.0 ms; does not fit b"),
        ({"as it is": None}, "does not fit as it is"),
    ],
)
def test_a_row_shows_the_range_over_its_readings(ours, text):
    assert PaperRow("what", "2", ours, "why", "{:.1f} ms").text() == text
