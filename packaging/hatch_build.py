"""Compiles the C modules of slipstream's own packages for hatchling: into a wheel, or in place."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Modules(BuildHookInterface[Any]):
    """Adds them to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a build. version: "editable" for an install that copies nothing."""
        sys.path.insert(0, str(Path(self.root, "packaging")))
        import extensions

        if version == "editable":
            extensions.compile_changed(Path(self.root))
        elif self.target_name == "wheel":
            self._compiled = tempfile.TemporaryDirectory()
            extensions.add_to_wheel(
                Path(self.root), self.config["modules"], Path(self._compiled.name), build_data
            )

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called after a build."""
        if hasattr(self, "_compiled"):
            self._compiled.cleanup()
