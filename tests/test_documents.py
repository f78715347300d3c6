"""Every command line and example of README and the handbook is run by a test, and prints what the page shows.

Here are those that need neither PyTorch nor a GPU nor a compiler; `tests.support.documents.PLACES` names the others.
"""

import os
import re
import tomllib
from fcntl import LOCK_EX, flock
from itertools import chain

import pytest

from tests.support.documents import (
    HANDBOOK,
    PLACES,
    Block,
    Reader,
    all_blocks,
    at,
    commands,
    example_place,
    examples_at,
    fenced,
    place_of,
)
from tests.support.paths import ROOT, shared_folder
from tests.support.printed import assert_prints
from ucudnn.networks.tables import CSV_HEADER

NO_OUTPUT = {  # blocks of text that no command prints
    ("architecture", "call with a Handle"),  # a drawing, as the next one
    ("architecture", "phase -- transition --> next phase"),
    ("profiles", CSV_HEADER),
}


def unknown(blocks):
    """Return the blocks that no test looks at."""
    found = []
    for block in blocks:
        first = block.text.strip().splitlines()[0]
        known = block.kind in ("sh", "python") or block.follows or (block.page, first) in NO_OUTPUT
        if not known and (block.kind, block.page) != ("cpp", "cpp-caffe") and block.page != "README":
            found.append(block)
    return found


def test_every_block_is_a_command_an_example_or_an_output():
    found = all_blocks()
    assert len(found) > 40
    assert unknown(found) == []
    assert unknown([Block("cli", "bash", "ls"), Block("cli", "text", "a table")])  # it can fail


def test_every_command_and_example_has_a_place_where_tests_run_it():
    assert {command.place for command in commands()} == set(PLACES)
    for place, path in PLACES.items():
        text = (ROOT / path).read_text()
        assert place == "ci" or f'at("{place}")' in text
        assert place in ("ci", "native") or f'examples_at("{place}")' in text
    with pytest.raises(ValueError, match="no test runs 'ucudnn-fly alexnet'"):
        place_of("ucudnn-fly alexnet")


def test_ci_runs_the_line_that_runs_the_tests():
    (line,) = {command.line for commands in at("ci").values() for command in commands}
    assert re.fullmatch(r'python3 -m venv .*pytest -q -n auto -m "not slow"', line)
    assert "grep -m 1 -E '^python3 -m venv .*pytest' README.md" in (ROOT / ".ci" / "run").read_text()


def test_what_commands_install_can_be_had():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = {command.installs for command in commands() if command.installs}
    assert {".", ".[test]", ".[torch]", ".[cuda13]"} == installed
    assert {each[2:-1] for each in installed - {"."}} <= set(extras)


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """Return a file in which the commands of all pages keep their measurements, as a reader's do, who has some."""
    path = shared_folder(tmp_path_factory, "pages") / "measurements.sqlite"
    reader = Reader(tmp_path_factory.mktemp("reader"), here=True, UCUDNN_BACKEND="cpu", UCUDNN_DATABASE=str(path))
    with path.with_suffix(".lock").open("a") as lock:  # once for all processes that share the folder
        flock(lock, LOCK_EX)
        if not os.fstat(lock.fileno()).st_size:  # pages for PyTorch may have made the file, and measured nothing
            reader.types("ucudnn plan bench/data/plane.csv --policy undivided")
            lock.write("measured")
    return path


DEVIATIONS = r"(measured again|predictions that|could not predict|a (possible|likely) reason|other programs used)"
WRITES = r"(--out|--plot|--save-plans|--export|--timeline|--addresses) (\S+)"


def turns():
    """Return lists of commands by the first of each: those of a page that share files, in turn, and all others alone.

    A command that several pages show is there for each of them, and runs once.
    """
    found = {}
    for shown in at("here").values():
        firsts = {}
        for command in shown:
            first = next((firsts[word] for word in command.runs.split() if word in firsts), command.runs)
            firsts |= {path: first for _, path in re.findall(WRITES, command.runs)}
            found.setdefault(first, []).append(command)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("first", turns(), ids=[*turns()])
def test_commands_run_in_turn_and_print_what_pages_show(first, tmp_path, database):
    reader = Reader(tmp_path, here=True, UCUDNN_BACKEND="cpu", UCUDNN_DATABASE=str(database))
    printed = {}
    for command in turns()[first]:
        if command.runs not in printed:
            printed[command.runs] = reader.types(command.runs)
        assert printed[command.runs].strip()
        if command.prints:
            assert_prints(printed[command.runs], command.prints, may_add=DEVIATIONS)
        for _, path in re.findall(WRITES, command.runs):
            assert (tmp_path / path).stat().st_size > 100


def test_each_command_has_a_turn_and_those_that_share_files_have_the_same_one():
    found = turns()
    assert sorted(map(str, chain(*found.values()))) == sorted(map(str, chain(*at("here").values())))
    assert {each.page for each in found["ucudnn time alexnet"]} == {"README", "quickstart"}
    kept = found["ucudnn profile alexnet --batch 2 --out alexnet.json"]
    assert [each.runs for each in kept[1:]] == ["ucudnn plan alexnet --profile alexnet.json"]
    moved = [each.runs for each in found["ucudnn profile --export mine.json"] if each.page == "profiles"]
    assert moved == ["ucudnn profile --export mine.json", "ucudnn profile --import mine.json"]


@pytest.mark.parametrize("example", examples_at("here"), ids=range(len(examples_at("here"))))
def test_an_example_runs(capsys, monkeypatch, example):
    monkeypatch.setenv("UCUDNN_BACKEND", "cpu")
    names = {}
    exec(compile(example, "documents", "exec"), names)
    printed = capsys.readouterr().out
    assert ("print(" in example) == ("WR, 4 MiB for each kernel" in printed)
    assert ("handle" in names) == ("Handle(" in example)


def test_readme_and_the_quickstart_show_the_same_run():
    shown = [block.text for block in all_blocks() if block.kind == "text" and block.page in ("README", "quickstart")]
    short, whole = (text.strip().splitlines() for text in shown)
    assert len(short) < len(whole)
    short, whole = ([line for line in text if line != "..."] for text in (short, whole))
    assert short == [line for line in whole if line in short]


def commands_in_text():
    """Return the commands of `ucudnn` in the running text: their words up to the first option or placeholder."""
    found = set()
    for text in HANDBOOK.values():
        for line in re.findall(r"`ucudnn ([a-z][^`]*)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)):
            words = line.split()
            names = [word for word in words[:2] if re.fullmatch(r"[a-z]+", word)]
            if words == ["ms"]:  # a column
                continue
            found.add((tuple(names[: 2 if words[0] in ("memory", "plot", "cache") else 1]), line))
    return sorted(found)


def test_commands_in_the_text_exist_with_their_options(call):
    found = commands_in_text()
    assert len(found) > 10
    for names, line in found:
        status, help_text, _ = call(*names, "--help")
        assert status == 0, line
        for option in re.findall(r"--[a-z-]+", line):
            assert re.search(rf"{option}\b", help_text), line


def test_a_block_below_a_command_is_its_output():
    text = "```sh\nucudnn doctor\n```\n\n```text\nok\n```\n\nWords.\n\n```text\nno output\n```\n"
    first, second, third = fenced("page", text)
    assert (first.kind, second.follows, third.follows) == ("sh", "ucudnn doctor", "")
    assert example_place("import cupy as cp\n") == "gpu"
