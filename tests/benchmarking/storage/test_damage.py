"""Damage: a check finds it and changes nothing; a plan sets a file aside that has a row that makes no sense."""

import logging
import re
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.databases import MACHINE, PARTS, PROBLEM, REQUEST, edit, files_set_aside, fill, rows
from ucudnn.benchmarking.storage.database import Database
from ucudnn.benchmarking.storage.store import MachineStore
from ucudnn.errors import DatabaseError, UcudnnError


@pytest.fixture
def path(tmp_path):
    fill(tmp_path / "measurements.db")
    return tmp_path / "measurements.db"


def check(path):
    with closing(Database(path, read_only=True)) as database:
        return database.check()


def test_a_sound_file_has_no_damage(path):
    assert check(path) == []
    assert sorted(file.name for file in path.parent.iterdir()) == ["measurements.db", "measurements.db.ucudnn-lock"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("status = 'guessed'", "status 'guessed' is none of measured, failed, hindered"),
        ("time_ms = -1.0", "time_ms -1.0 is no number"),
        ("time_ms = 0", "0.0 ms is no time"),
        ("time_ms = 9e999", "time_ms inf is no number"),
        ("time_ms = 'fast'", "time_ms 'fast' is no number"),
        ("spread_ms = -1.0", "spread_ms -1.0 is no number"),
        ("samples = -1", "samples -1"),
        ("samples = 1.5", "samples 1.5"),
        ("workspace_bytes = -512", "workspace_bytes -512"),
        ("workspace_bytes = 'much'", "workspace_bytes 'much'"),
        ("compiles = 2", "compiles 2 is no whole number from 0 to 1"),
        ("complete = 'no'", "complete 'no' is no whole number"),
        ("notes = x'00'", "notes"),
        ("reason = x'ff'", "reason"),
        ("algorithm = ''", "algorithm ''"),
    ],
)
def test_an_edited_measurement_is_named_and_the_file_is_set_aside(path, change, message, caplog):
    edit(path, f"UPDATE measurements SET {change} WHERE algorithm = 'eng1_k2=3' AND workspace_bytes = 512")
    assert any(message in line for line in check(path))
    with closing(Database(path)) as database, caplog.at_level(logging.WARNING):
        assert MachineStore(database, MACHINE, "cudnn").load(PARTS) == []
        assert re.search(rf"is damaged \(.*{re.escape(message)}.*set aside", caplog.text)
        assert database.check() == []
    assert len(files_set_aside(path)) == 1


@pytest.mark.parametrize(
    "change",
    [
        *("names = '[1]'", "names = '{'", "names = '\"ab\"'"),
        *("sizes = '[0]'", "sizes = '[5]'", "sizes = '7'", "sizes = '[true]'"),
        *("divisions = '[[1]]'", "divisions = '[[4, 99]]'", "divisions = '[[9, 1]]'"),
    ],
)
def test_an_edited_exploration_is_named_and_the_file_is_set_aside(path, change, caplog):
    edit(path, f"UPDATE explorations SET {change}")
    assert any("what was tried for" in line for line in check(path))
    with closing(Database(path)) as database, caplog.at_level(logging.WARNING):
        assert MachineStore(database, MACHINE, "cudnn").load_exploration(REQUEST) is None
    assert re.search(r"is damaged \(what was tried for .*set aside", caplog.text)
    assert len(files_set_aside(path)) == 1


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE machines SET conditions = '{'", "machine '{' cannot be read"),
        ("UPDATE machines SET conditions = '[]'", "machine '[]' cannot be read"),
        ('UPDATE machines SET conditions = \'{"device":"another"}\'', "has the key of something else"),
        ("UPDATE machines SET conditions = CAST(conditions AS BLOB)", "is no text"),
        ("UPDATE machines SET conditions = CAST(x'7b2264223a22ff227d' AS TEXT)", "has the key of something else"),
        ("UPDATE problems SET problem = CAST(x'ff' AS TEXT)", "has the key of something else"),
        ("UPDATE problems SET problem = '{}'", "'{}' has the key of something else"),
        ("UPDATE problems SET problem = CAST(problem AS BLOB)", "is no text"),
        ("UPDATE measurements SET api = 'magic'", "API 'magic' is none of graph, legacy, cpu"),
        ("UPDATE measurements SET measured_at = 'today'", "today"),
        ("UPDATE explorations SET explored_at = x'00'", "is no text"),
        ("UPDATE explorations SET request = '7'", "is no JSON object"),
        ("DELETE FROM machines", "the machine of 6 measurements is missing"),
        ("DELETE FROM problems", "the problem of 1 explorations is missing"),
        ("DROP TABLE machines", "the tables have another form"),
        ("UPDATE sqlite_master SET sql = CAST(sql AS BLOB) WHERE name = 'machines'", "the tables have another form"),
        ("UPDATE measurements SET reason = CAST(x'ff' AS TEXT)", "surrogates not allowed"),
    ],
)
def test_check_names_what_else_makes_no_sense(path, statement, message):
    edit(path, statement)
    before = path.read_bytes()
    lines = check(path)
    assert any(message in line for line in lines), lines
    assert path.read_bytes() == before


def test_broken_conditions_are_an_error_of_the_summary_and_a_date_that_is_no_text_is_shown(path):
    edit(path, "UPDATE measurements SET measured_at = x'ff'")
    with closing(Database(path, read_only=True)) as database:
        ((first, last),) = [(each.first, each.last) for each in database.machines()]
    assert type(first) is type(last) is str
    edit(path, "UPDATE machines SET conditions = '{'")
    with closing(Database(path, read_only=True)) as database, pytest.raises(DatabaseError, match="cannot be read"):
        database.machines()


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "measurements.db"
    fill(path)
    return path


@given(place=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255), head=st.booleans())
def test_a_flipped_byte_is_found_or_does_no_harm(sound, tmp_path_factory, place, bits, head):
    """Flip a byte of the header, or one that holds something: most of a small file is empty."""
    damaged = bytearray(sound.read_bytes())
    used = range(100) if head else [index for index, byte in enumerate(damaged) if byte]
    damaged[used[int(place * len(used))]] ^= bits
    path = tmp_path_factory.mktemp("damaged") / "measurements.db"
    path.write_bytes(damaged)
    try:
        lines = check(path)
    except UcudnnError as error:
        lines = [str(error)]
    assert path.read_bytes() == damaged
    assert list(path.parent.iterdir()) == [path]
    try:
        with closing(Database(path)) as database:
            found = database.load(MACHINE, PARTS)
            exploration = database.load_exploration(MACHINE, "cudnn", REQUEST)
    except DatabaseError:
        return
    assert lines or not files_set_aside(path)  # a check finds what a plan sets aside
    for part, each in found:  # a changed time that could be true cannot be told from a true one
        assert part in PARTS
        assert not each.measured or each.micro(part.batch).time_ms == each.time_ms
    assert lines or len(found) == len(rows())
    assert exploration is None or all(part.batch <= PROBLEM.batch for part in exploration.parts(PROBLEM))
