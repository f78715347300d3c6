import csv
import io
import re
from pathlib import Path
from warnings import catch_warnings, simplefilter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ucudnn
from ucudnn.errors import InvalidSizeError
from ucudnn.units import bytes_down, bytes_up, csv_text, format_bytes, format_ms, parse_budget, parse_bytes, parse_limit


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("67108864", 64 * 2**20),
        ("64MiB", 64 * 2**20),
        (" 64 mib ", 64 * 2**20),
        ("64M", 64 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("0.1KB", 100),
        ("2 GB", 2 * 10**9),
        (4096, 4096),
        ("23.65GiB", 25393994137),
        ("1.0000001KiB", 1024),
    ],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("bad", ["", "MiB", "-1", "64 MoB", "1e9", "0.3", "1.5", "nan", -1, True, 1.5, None])
def test_other_texts_are_refused_and_the_error_lists_the_forms(bad):
    with pytest.raises(InvalidSizeError, match=r"64MiB, 1\.5 GiB") as caught:
        parse_bytes(bad)
    assert str(bad) in str(caught.value)


@pytest.mark.parametrize(
    ("budget", "size"),
    [("80%", 800), (" 12.55 % ", 125), ("0.8", 800), (0.8, 800), (".5", 500), ("1.0", 1000), ("2MiB", 2**21)],
)
def test_budgets_are_sizes_or_shares_of_a_memory(budget, size):
    assert parse_budget(budget, 1000) == size


@pytest.mark.parametrize("bad", ["0%", "101%", "0.0", 1.5, "80 percent", "-80%", float("nan")])
def test_other_budgets_are_refused(bad):
    with pytest.raises(InvalidSizeError):
        parse_budget(bad, 1000)


def test_a_few_bytes_without_a_unit_are_taken_for_a_mistake():
    with pytest.warns(UserWarning, match="workspace=64 is 64 bytes: write 64MiB if you mean MiB"):
        assert parse_limit("64", "workspace") == 64
    with catch_warnings():
        simplefilter("error")
        assert [parse_limit(each, "workspace") for each in ("0", "64KiB", "16384", 64)] == [0, 65536, 16384, 64]


@given(st.integers(0, 2**50))
def test_a_need_is_rounded_up_and_a_limit_down(size):
    need, limit = (text(size).removesuffix(" bytes") for text in (bytes_up, bytes_down))
    assert size * 0.999 - 1 <= parse_bytes(limit) <= size <= parse_bytes(need) <= size * 1.001 + 1
    assert parse_bytes(limit) < size or need == limit


@given(st.integers(1, 2**50))
def test_formatted_text_is_within_half_a_percent(size):
    assert parse_bytes_of_people(format_bytes(size)) == pytest.approx(size, rel=0.005)


def parse_bytes_of_people(text):
    number, unit = text.split()
    return float(number) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]


@given(st.floats(1e-4, 1e6))
def test_formatted_time_is_within_half_a_percent(time_ms):
    number, unit = format_ms(time_ms).split()
    assert float(number) * {"ms": 1, "s": 1000}[unit] == pytest.approx(time_ms, rel=0.005)


def test_examples():
    assert [format_bytes(size) for size in (0, 1, 1536, 64 * 2**20)] == ["0", "1 B", "1.50 KiB", "64 MiB"]
    assert [format_ms(time) for time in (0.0412, 12.34, 99.96, 23456)] == ["0.0412 ms", "12.3 ms", "100 ms", "23.5 s"]


def test_sizes_that_no_memory_has_are_refused_in_a_short_line():
    texts = ("9" * 5000, "1" + "0" * 400 + ".5MiB", "9" * 25 + "MiB", "1." + "0" * 5000, "٣MiB")
    for size in (*texts, 1 << 63, 10**5000):
        with pytest.raises(InvalidSizeError) as refused:
            parse_bytes(size)
        assert len(str(refused.value)) < 400


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", '=HYPERLINK("x","y")'])
def test_text_is_never_a_formula(text):
    assert list(csv.reader(io.StringIO(csv_text([text], [[text]]), newline=""))) == [["'" + text]] * 2


def test_other_values_stay_as_they_are():
    rows = list(csv.reader(io.StringIO(csv_text(["a", "b"], [["conv=1", -2.5], ["a,b", None], ["'=1", True]]))))
    assert rows == [["a", "b"], ["conv=1", "-2.5"], ["a,b", ""], ["'=1", "True"]]


def test_csv_is_written_in_one_place():
    package = Path(ucudnn.__file__).parent
    writes = re.compile(r"csv\.(Dict)?[wW]riter")
    assert [path.name for path in package.rglob("*.py") if writes.search(path.read_text())] == ["units.py"]
