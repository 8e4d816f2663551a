"""The pages of documentation and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *GUIDES, ROOT / "examples" / "README.md"]


class Block(NamedTuple):
    """A block of code. name: its page and number among the page's blocks of that language."""

    name: str
    text: str


def shown_outputs() -> list[tuple[str, str]]:
    """The last commands of blocks that are followed by a block with what they print."""
    pairs = re.compile(r"^```bash\n(.*?)^```\n\n```text\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [
        (commands.strip().splitlines()[-1], output)
        for page in PAGES
        for commands, output in pairs.findall(page.read_text())
    ]


def blocks(language: str) -> list[Block]:
    """All blocks of a language, in the order of `PAGES` and within each page."""
    return [
        Block(f"{page.relative_to(ROOT)}-{number}", text)
        for page in PAGES
        for number, text in enumerate(
            re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE), 1
        )
    ]
