"""Collects the client's files for hatchling: in a clone they lie beside those of slipstream, in an
sdist below `sources/`. A wheel has C compiled.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ClientFiles(BuildHookInterface[Any]):
    """Adds them to a wheel as packages, to an sdist as they lie in the clone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a build. version: "editable" for an install that copies nothing."""
        here = Path(self.root)
        is_from_sdist = (here / "sources").is_dir()
        root = here / "sources" if is_from_sdist else here.parents[1]
        sys.path.insert(0, str(root / "packaging"))
        import extensions

        if version == "editable":
            extensions.compile_changed(root)
            return
        is_wheel = self.target_name == "wheel"
        included = build_data["force_include"]
        for folder, names in self.config["sources"].items():
            target = Path(folder).name if is_wheel else f"sources/{folder}"
            for name in names:
                for path in _files(root / folder / name):
                    if not (is_wheel and path.suffix in (".c", ".h")):
                        included[str(path)] = f"{target}/{path.relative_to(root / folder)}"
        if not is_wheel:
            included[extensions.__file__] = "sources/packaging/extensions.py"
            return
        self._compiled = tempfile.TemporaryDirectory()
        packages = [Path(folder).name for folder in self.config["sources"]]
        extensions.add_to_wheel(root, packages, Path(self._compiled.name), build_data)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called after a build."""
        if hasattr(self, "_compiled"):
            self._compiled.cleanup()


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(each for each in path.rglob("*") if each.is_file())
    made = (".pyc", ".so", ".inputs")
    return [each for each in found if each.suffix not in made]
