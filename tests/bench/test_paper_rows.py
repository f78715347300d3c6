"""The tables of docs/memory-papers.md are those of bench/results/memory, and rows show ranges over readings."""

import pytest

from bench.memory.link import run, tables
from bench.memory.page import SCRIPTS, with_tables, written
from bench.memory.paper_rows import PaperRow, load_rows, markdown
from bench.tools.results import RESULTS, ROOT, load
from tests.support.nearly import nearly_equal

PAGE = (ROOT / "docs" / "memory-papers.md").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_page_shows_the_results(name):
    rows = load_rows(load(RESULTS / "memory" / f"{name}.json"))
    assert len(rows) > 4
    assert markdown(rows) in PAGE


def test_the_page_is_as_the_script_writes_it():
    assert written(PAGE) == PAGE


def test_tables_behind_the_name_of_their_script_are_replaced_and_no_others():
    page = """`python -m bench.memory.other` makes this table.

| kept |
| --- |

`python -m bench.memory.mine` makes both tables. And more words.

| old |
| --- |
| row |

| second |
| --- |

Text below.

| last |
"""
    assert with_tables(page, "mine", "| new |\n\n| newer |\n| row |") == page.replace(
        "| old |\n| --- |\n| row |\n\n| second |\n| --- |", "| new |\n\n| newer |\n| row |"
    )
    with pytest.raises(ValueError, match=r"no line of the page names bench\.memory\.third"):
        with_tables(page, "third", "| new |")


def test_the_page_shows_all_policies_on_todays_link():
    answer = load(RESULTS / "memory" / "link.json")
    assert len(answer["policies"]) == 7
    assert tables(answer) in PAGE


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
        ({"a": 3.0, "b": 1.0, "c": 2.0}, "1.0 ms to 3.0 ms"),
        ({"a": 1.01, "b": 1.02}, "1.0 ms"),
        ({"a": 1.0, "b": None}, "1.0 ms; does not fit b"),
        ({"as it is": None}, "does not fit as it is"),
    ],
)
def test_a_row_shows_the_range_over_its_readings(ours, text):
    assert PaperRow("what", "2", ours, "why", "{:.1f} ms").text() == text
