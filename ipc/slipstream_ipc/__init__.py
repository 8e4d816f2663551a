"""Code shared by Slipstream's processes: messages, transport, histories, checks, statistics."""

import os

_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_build = os.path.join(_root, "packaging", "extensions.py")
if os.path.exists(_build):  # a clone: its C modules are to be no older than their sources
    import importlib.util
    from pathlib import Path

    _spec = importlib.util.spec_from_file_location("slipstream_extensions", _build)
    assert _spec is not None
    assert _spec.loader is not None
    _extensions = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_extensions)
    _extensions.compile_changed(Path(_root))
