"""The documents whose examples and commands are tested: README and the handbook.

Every fenced block has a place where the tests run it. `place_of` knows no other command than those that it names, so a
new kind of command fails until a test runs it.
"""

import os
import re
import shlex
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from runpy import run_path
from unittest.mock import patch

from tests.support.paths import ROOT
from ucudnn.cli.app import main

README = (ROOT / "README.md").read_text()
HANDBOOK = {path.stem: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
PAGES = {"README": README, **HANDBOOK}

PLACES = {  # where the commands and examples of a place run
    "here": "tests/test_documents.py",
    "torch": "tests/torch/test_documents.py",
    "gpu": "tests/gpu/test_documents.py",
    "native": "tests/native/test_documents.py",
    "ci": ".ci/run",  # the tests themselves
}
_VENV = re.compile(r"python3 -m venv \.venv && \.venv/bin/pip install --quiet (\S+|-e \S+) && \.venv/bin/(.*)")
_NAMES = (  # the first that a command has decides
    ("gpu", r"cuda1[23]|--workspace auto|swap_the_handle"),
    ("ci", r"-m pytest"),
    ("native", r"^c\+\+ "),
    ("torch", r"^torchrun |^python -m ucudnn\.torch |--torch |memory (record|run) |my_models:|\bnet\.json|\.\[torch\]"),
    ("here", r"^ucudnn (plan|time|profile|memory|plot|doctor) |^ucudnn doctor$|^python examples/"),
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: the page.
        kind: the language of the fence.
        text: what it holds.
        follows: the command directly above, whose output this block shows; '' if there is none.
    """

    page: str
    kind: str
    text: str
    follows: str = ""


@dataclass(frozen=True)
class Command:
    """A line of a block of commands.

    Attributes:
        page: the page.
        line: the line as it stands there, without comments.
        installs: what the line installs first, such as '.[cuda13]'; '' if nothing.
        runs: the command itself.
        prints: the output that the page shows; '' if it shows none.
    """

    page: str
    line: str
    installs: str
    runs: str
    prints: str

    @property
    def place(self):
        return place_of(self.runs, self.installs)


def place_of(command, installs=""):
    for place, pattern in _NAMES:
        if re.search(pattern, command) or (place in ("gpu", "torch") and re.search(pattern, installs)):
            return place
    raise ValueError(f"no test runs {command!r}: name its place in tests/support/documents.py")


def example_place(example):
    if re.search(r"^(import cupy|from ucudnn import cudnn)", example, re.M):
        return "gpu"
    return "torch" if "import torch" in example else "here"


def fenced(page, text):
    found, last = [], None
    for match in re.finditer(r"^```([a-z]*)\n(.*?)^```$", text, re.M | re.S):
        above = last if last and not text[last.end() : match.start()].strip() and last[1] == "sh" else None
        follows = above[2].strip().splitlines()[-1] if above and match[1] == "text" else ""
        found.append(Block(page, match[1], match[2], follows))
        last = match
    return found


def all_blocks():
    return [block for page, text in PAGES.items() for block in fenced(page, text)]


def blocks(kind):
    """Return the blocks of code of a kind, README's first, each once."""
    return list(dict.fromkeys(block.text for block in all_blocks() if block.kind == kind))


def commands():
    """Return the commands of all pages, in order."""
    shown = {(each.page, each.follows): each.text for each in all_blocks() if each.follows}
    found = []
    for block in all_blocks():
        for line in block.text.strip().splitlines() if block.kind == "sh" else ():
            plain = re.sub(r"\s+#.*$", "", line)
            match = _VENV.fullmatch(plain)
            installs, runs = (shlex.split(match[1])[-1], match[2]) if match else ("", plain)
            found.append(Command(block.page, plain, installs, runs, shown.get((block.page, line), "")))
    return found


def at(place):
    found = {}
    for command in commands():
        if command.place == place:
            found.setdefault(command.page, []).append(command)
    return found


def examples_at(place):
    return [each for each in blocks("python") if example_place(each) == place]


class Reader:
    """A reader who types commands into a shell, in a folder with what a clone has.

    Args:
        folder: the folder; commands write there.
        here: whether what starts no process of its own runs in this one, because a new one imports and reads all anew.
        environment: variables beside those of this process.

    Attributes:
        told: what the last command wrote to standard error.
    """

    def __init__(self, folder, *, here=False, **environment):
        self.folder, self.here = folder, here
        self.told = ""
        for name in ("examples", "bench"):
            (folder / name).symlink_to(ROOT / name)
        programs = folder / "bin"
        programs.mkdir()
        for name, module in (("python", ""), ("ucudnn", "-m ucudnn"), ("torchrun", "-m torch.distributed.run")):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
            program.chmod(0o755)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("UCUDNN_")}
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**clean, "PATH": path, "PYTHONPATH": str(ROOT), **environment}

    def types(self, command):
        words = shlex.split(command)
        if self.here and words[0] == "ucudnn":
            return self._types_here(words, main)
        if self.here and words[:3] == ["python", "-m", "ucudnn.torch"]:
            from ucudnn.torch.__main__ import main as run_program  # not at the top, because PyTorch may not be there

            return self._types_here(words[2:], run_program)
        if self.here and words[0] == "python" and "torchrun" not in (self.folder / words[1]).read_text():
            return self._types_here(words[1:], partial(run_path, words[1], run_name="__main__"))
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=False, cwd=self.folder, env=self.environment
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        self.told = done.stderr
        return done.stdout

    def _types_here(self, words, program):
        out, told, status, before = StringIO(), StringIO(), 0, {*sys.modules}
        path = patch("sys.path", [str((self.folder / words[0]).parent), *sys.path])
        with chdir(self.folder), patch.dict(os.environ, self.environment, clear=True), patch("sys.argv", words), path:
            try:
                with redirect_stdout(out), redirect_stderr(told):
                    program()
            except SystemExit as end:
                status = end.code
        assert not status, f"{words}\n{out.getvalue()}{told.getvalue()}"
        for name in {*sys.modules} - before:  # another reader has other programs of these names
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(self.folder)):
                del sys.modules[name]
        self.told = told.getvalue()
        return out.getvalue()
