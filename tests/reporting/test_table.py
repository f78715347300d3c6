"""Reports as notebooks show them: a table whose headings explain themselves, whatever the names hold."""

from html.parser import HTMLParser

import pytest

from tests.support.reports import kernel_report, make_report
from ucudnn.reporting.report import EXPLANATIONS, html_table


class Cells(HTMLParser):
    """The cells of the tables in a page, by tag, and the explanations of the headings."""

    def __init__(self, page):
        super().__init__()
        self.cells, self.titles, self.open = {"th": [], "td": [], "div": [], "caption": []}, [], []
        self.feed(page)
        self.close()
        assert not self.open, "an element was not closed"

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        if tag in self.cells:
            self.cells[tag].append("")
        if tag == "th":
            self.titles.append(dict(attributes)["title"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in self.open:
            if tag in self.cells:
                self.cells[tag][-1] += data


def test_a_table_holds_every_cell_as_it_is():
    page = Cells(html_table("a <b>", ["layer", "other"], [("x & y", "<script>"), ("1", "2")], ["below > all"]))
    assert page.cells["th"] == ["layer", "other"]
    assert page.cells["td"] == ["x & y", "<script>", "1", "2"]
    assert (page.cells["caption"], page.cells["div"]) == (["a <b>"], ["below > all"])
    assert page.titles == [EXPLANATIONS["layer"], ""]


@pytest.mark.parametrize("times", [{}, {"executed_ms": 1.0, "undivided_executed_ms": 2.0}])
def test_a_report_is_shown_with_all_of_its_text_and_explains_each_column(times):
    report = make_report(kernel_report(**times))
    page = Cells(report._repr_html_())
    assert page.cells["caption"] == ["net, mini-batch 256 on a device"]
    assert tuple(page.cells["th"]) == report.columns()
    assert page.cells["td"] == [cell for row in report.rows() for cell in row]
    assert tuple(page.cells["div"]) == report.summary()
    assert all(page.titles)


def test_records_are_plain_values_for_a_data_frame():
    report = make_report(kernel_report(), kernel_report(layer="conv2", undivided=None, undivided_ms=None))
    records = report.records()
    assert [each["layer"] for each in records] == ["conv1", "conv2"]
    assert [each["speedup"] for each in records] == [3.0, None]
    assert all(value is None or isinstance(value, str | int | float) for each in records for value in each.values())
    assert len({tuple(each) for each in records}) == 1
