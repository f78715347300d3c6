"""The dictionary that drops its oldest entry, and files that are larger than any that makes sense."""

import gzip
import tracemalloc
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucudnn.bounded import MOST_BYTES, BoundedDict, named_file, read_whole
from ucudnn.errors import InvalidNetworkError, InvalidValueError, PlanFileError, ProfileError, StepFileError
from ucudnn.memory.devices.profile import load_device
from ucudnn.memory.step.file import load_step
from ucudnn.memory.step.shipped import open_measured_step
from ucudnn.networks.tables import CSV_HEADER, load_network
from ucudnn.planning.plan_file import read_plans
from ucudnn.profiles import format as profile_format
from ucudnn.profiles.format import load_profile


def test_the_oldest_entry_is_dropped_when_a_new_one_comes_whatever_writes_it():
    known = BoundedDict(2)
    known.update({"z": 0, "a": 1, "b": 2})
    assert known.get("a") == 1, "a look-up does not renew an entry"
    known["a"] = 3
    assert known == {"a": 3, "b": 2}, "a new value for a known key drops nothing"
    assert known.setdefault("c", 4) == 4
    assert known == {"b": 2, "c": 4}, "a new value does not renew the age of its key"
    assert known.setdefault("b", 0) == 2
    known |= {"d": 5}
    assert list(known) == ["c", "d"]
    del known["d"]
    known["e"] = 6
    assert list(known) == ["c", "e"], "an entry that was deleted makes room"


@pytest.mark.parametrize("most", [0, -1])
def test_a_dictionary_for_nothing_is_refused(most):
    with pytest.raises(ValueError, match=f"at most {most} entries"):
        BoundedDict(most)


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 9), st.integers())))
def test_it_holds_the_newest_keys(most, writes):
    known, model = BoundedDict(most), OrderedDict()
    for key, value in writes:
        known[key] = model[key] = value
        if len(model) > most:
            model.popitem(last=False)
        assert list(known.items()) == list(model.items())


def test_threads_may_write_at_the_same_time():
    known = BoundedDict(8)

    def write(thread):
        for number in range(5000):
            known[thread, number % 50] = number
            known.get((thread, number % 7))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))  # raises what a thread raised
    assert len(known) <= 8


def test_a_file_is_read_up_to_its_bound(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_whole(file, 5) == b"12345"
    with pytest.raises(InvalidValueError, match="it has more than 4"):
        read_whole(file, 4)


@pytest.fixture(scope="module")
def packed():
    """Return a small file that unpacks to more than any file may have."""
    data = gzip.compress(b" " * MOST_BYTES + b"{}", compresslevel=1)
    assert len(data) < MOST_BYTES / 100
    return data


@pytest.mark.parametrize(
    ("load", "error"),
    [
        (load_step, StepFileError),
        (lambda path: open_measured_step(str(path)), StepFileError),
        (lambda path: load_device(str(path)), ProfileError),
        (read_plans, PlanFileError),
        (lambda path: load_profile(str(path)), ProfileError),
    ],
    ids=["step", "measured step", "device", "plans", "profile"],
)
def test_a_small_file_that_unpacks_to_a_large_one_is_refused(tmp_path, monkeypatch, packed, load, error):
    monkeypatch.setattr(profile_format, "_MOST_BYTES", MOST_BYTES)
    path = tmp_path / "file.json.gz"
    path.write_bytes(packed)
    tracemalloc.start()
    try:
        with pytest.raises(error, match=r"file\.json\.gz.*: it has more than 64 MiB, unpacked, which is the most"):
            load(path)
        assert tracemalloc.get_traced_memory()[1] < 3 * MOST_BYTES
    finally:
        tracemalloc.stop()


def test_a_table_of_a_network_is_not_read_beyond_its_bound(tmp_path):
    path = tmp_path / "network.csv"
    path.write_text(f"{CSV_HEADER}\n" + "x" * (1 << 22))
    with pytest.raises(InvalidNetworkError, match="cannot be read: it has more than 4 MiB"):
        load_network(str(path))


@pytest.mark.parametrize(
    ("name", "reason"), [("n" * 300, "cannot be read: File name too long"), ("no", "is neither so")]
)
def test_a_named_file_that_is_not_there_is_refused(tmp_path, name, reason):
    with pytest.raises(ProfileError, match=f"^thing '.*{reason}"):
        named_file("thing", str(tmp_path / name), ProfileError, "so nor so")
    (tmp_path / "file").write_text("")
    assert named_file("thing", str(tmp_path / "file"), ProfileError, "") == tmp_path / "file"
