"""The documents whose examples and commands are tested: README and the handbook."""

import re

from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text()
HANDBOOK = {path.stem: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}


def blocks(kind):
    """Return the blocks of code of a kind, README's first, each once."""
    found = [
        block for text in (README, *HANDBOOK.values()) for block in re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)
    ]
    return list(dict.fromkeys(found))
