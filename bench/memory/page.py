"""Write the tables of `bench/results/memory` into docs/memory-papers.md, behind the lines that name their scripts.

    python -m bench.memory.page

Run it when those scripts have written new results.
"""

from collections.abc import Sequence

from bench.memory.link import tables
from bench.memory.paper_rows import load_rows, markdown
from bench.tools.results import RESULTS, ROOT, load
from bench.tools.script import command_line, run_main

PAGE = ROOT / "docs" / "memory-papers.md"
SCRIPTS = ("vdnn", "vdnn_ext", "swap", "translation", "dymem")


def with_tables(page: str, script: str, table: str) -> str:
    """Return a page whose first tables behind the line that names a script are those of a text.

    Raises:
        ValueError: if no line names the script.
    """
    lines = page.splitlines()
    named = next((number for number, line in enumerate(lines) if f"`python -m bench.memory.{script}`" in line), None)
    if named is None:
        raise ValueError(f"no line of the page names bench.memory.{script}")
    begin = end = _next_table(lines, named)
    for _ in table.split("\n\n"):
        begin_of_one = _next_table(lines, end)
        end = next((at for at in range(begin_of_one, len(lines)) if not lines[at].startswith("|")), len(lines))
    return "\n".join([*lines[:begin], *table.splitlines(), *lines[end:]]) + "\n"


def _next_table(lines: Sequence[str], after: int) -> int:
    return next(number for number in range(after, len(lines)) if lines[number].startswith("|"))


def written(page: str) -> str:
    """Return a page with the tables of all results."""
    for script in SCRIPTS:
        page = with_tables(page, script, markdown(load_rows(load(RESULTS / "memory" / f"{script}.json"))))
    return with_tables(page, "link", tables(load(RESULTS / "memory" / "link.json")))


def main() -> None:
    """Write the tables."""
    command_line(__doc__, "bench.memory.page").parse_args()
    PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    run_main(main)
