"""Collects the client's files for hatchling: in a clone they lie beside those of slipstream, in an
sdist below `sources/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ClientFiles(BuildHookInterface[Any]):
    """Adds them to a wheel as packages, to an sdist as they lie in the clone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a build. version: "editable" for an install that copies nothing."""
        if version == "editable":
            return
        here = Path(self.root)
        is_sdist = (here / "sources").is_dir()
        root = here / "sources" if is_sdist else here.parents[1]
        included = build_data["force_include"]
        for folder, names in self.config["sources"].items():
            target = f"sources/{folder}" if self.target_name == "sdist" else Path(folder).name
            for name in names:
                for path in _files(root / folder / name):
                    included[str(path)] = f"{target}/{path.relative_to(root / folder)}"


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(each for each in path.rglob("*") if each.is_file())
    return [each for each in found if "__pycache__" not in each.parts]
