"""What of `slipstream` imports what."""

from __future__ import annotations

import grimp
import pytest


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Of each module of the package, imports inside functions and for type checkers included."""
    graph = grimp.build_graph("slipstream")
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_no_module_imports_itself_by_way_of_others(imports: dict[str, set[str]]) -> None:
    assert len(imports) > 80
    left = dict(imports)
    while True:  # take away what imports nothing that is left
        free = {module for module, needs in left.items() if not needs & left.keys()}
        if not free:
            break
        left = {module: needs for module, needs in left.items() if module not in free}
    assert not left
