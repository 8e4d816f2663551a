"""Code shared by Slipstream's processes: messages, transport, histories, checks, statistics."""

from pathlib import Path

_build = Path(__file__).parents[2] / "packaging" / "extensions.py"
if _build.exists():  # a clone: its C modules are to be no older than their sources
    import importlib.util

    _spec = importlib.util.spec_from_file_location("slipstream_extensions", _build)
    assert _spec is not None
    assert _spec.loader is not None
    _extensions = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_extensions)
    _extensions.compile_changed(_build.parents[1])
