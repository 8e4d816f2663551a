"""Docstrings name the thing: "Return …", "True if …", "The … of …".

A docstring of the product that begins with a question word ("What it holds", "Whether it is open")
or as a fragment ("Of each row", "As `add`") names no thing and reads as if it were translated. This
names each of them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("api", "contrib", "engine_core", "ipc", "output_worker")
BEGINNING = re.compile(r"\s*(What|Whether|Of|As|Those|That|Who|Where|When|How|Which|Why)\b")

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def findings(source: str) -> Iterator[tuple[int, str]]:
    """The line and the first word of each such docstring."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, _DOCUMENTED):
            continue
        text = ast.get_docstring(node, clean=False)
        if text is not None and (found := BEGINNING.match(text)) is not None:
            yield node.body[0].lineno, found[1]


def main() -> int:
    """Exit code 1 where there is one."""
    num = 0
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for line, word in sorted(findings(file.read_text(encoding="utf-8"))):
                path = file.relative_to(ROOT)
                sys.stderr.write(f"{path}:{line}: begins with {word!r}\n")
                num += 1
    if num:
        sys.stderr.write('a docstring names the thing: "Return …", "True if …", "The … of …"\n')
    return 1 if num else 0


if __name__ == "__main__":
    sys.exit(main())
