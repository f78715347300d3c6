"""README and the handbook are true: one page, two first commands, links that lead somewhere, plans to the digit."""

import json
import re

from tests.support.documents import HANDBOOK, README, blocks
from tests.support.paths import ROOT
from ucudnn.settings import VARIABLES


def test_readme_is_one_page():
    assert len(README.splitlines()) <= 150


def test_there_are_two_command_lines_for_newcomers():
    commands = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    commands = [block for block in commands if "venv" in block and "cuda" not in block]
    assert len(commands) == 2
    assert all(len(command.strip().splitlines()) == 1 for command in commands)


PLAN = ("plan", "alexnet", "--profile", "h200", "--workspace", "64MiB")


def test_the_plan_is_what_the_command_prints(call):
    def stable(text):
        return [line.rstrip() for line in text.strip().splitlines() if not line.startswith("decided in")]

    shown = [block for block in blocks("text") if "NVIDIA H200" in block]
    assert shown
    printed = stable(call(*PLAN)[1])
    for block in shown:
        first, last = map(stable, block.split("...\n"))
        assert printed[: len(first)] == first
        assert printed[-len(last) :] == last


def test_there_is_one_picture_and_its_words_are_those_of_the_plan(call):
    ((words, path),) = re.findall(r"!\[(.*?)\]\((.*?)\)", README, re.DOTALL)
    assert (ROOT / path).read_bytes().startswith(b"\x89PNG")
    total = json.loads(call(*PLAN, "--json")[1])["total"]
    assert re.findall(r"[\d.]+ ms", words) == [f"{total['undivided_ms']:.1f} ms", f"{total['micro_batched_ms']:.1f} ms"]


def test_the_handbook_names_every_variable():
    for variable in VARIABLES.values():
        assert f"`{variable}`" in HANDBOOK["settings"]


def test_links_between_documents_lead_somewhere():
    texts = {"README.md": README} | {f"docs/{name}.md": text for name, text in HANDBOOK.items()}
    count = 0
    for source, text in texts.items():
        for target in re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", text):
            assert ((ROOT / source).parent / target).is_file(), f"{source} links to {target}"
            count += 1
    assert count > 20


def test_every_page_is_in_the_navigation():
    pages = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert pages == {f"{name}.md" for name in HANDBOOK}
