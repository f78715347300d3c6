"""README.md as a package index shows it, which knows none of the repository's files.

Its links go to the repository's address, `Source` of pyproject.toml's `project.urls`. Without an address they are plain
text, and a picture is its words.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]*)\)")


def portable(text: str, source: str | None) -> str:
    """Return a text in Markdown whose links to files of the repository work, or are none.

    Args:
        text: the text.
        source: address of the repository; None if there is none.
    """

    def linked(match: re.Match[str]) -> str:
        picture, words, path = match.groups()
        if source is None:
            return f"*{words}*" if picture else words
        return f"{picture}[{words}]({source.rstrip('/')}/{'raw' if picture else 'blob'}/HEAD/{path})"

    return _LINK.sub(linked, text)


class CustomMetadataHook(MetadataHookInterface):
    """Takes README.md into the metadata of a build."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the text to the metadata."""
        text = portable((Path(self.root) / "README.md").read_text("utf-8"), metadata.get("urls", {}).get("Source"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
