"""The documents whose examples and commands are tested."""

import re

from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text()


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", README, re.DOTALL)
