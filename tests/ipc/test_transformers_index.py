"""transformers is imported with the list of its models from the cache, and is the same as ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from slipstream_ipc.transformers_index import _index_path, _with_cache

pytestmark = pytest.mark.process

# how many models' files are read, and a digest of what transformers then says that it exports
IMPORT = """
import hashlib, json, sys
from slipstream_ipc.transformers_index import use_cached_index
sys.modules["torch"] = None  # it takes longer than all else
finders = list(sys.meta_path)
if sys.argv[1] == "cached":
    use_cached_index()
    use_cached_index()  # without effect
    assert len(sys.meta_path) == len(finders) + 1
read = set()
def note(event, arguments):
    if event == "open" and "/transformers/models/" in str(arguments[0]):
        if str(arguments[0]).endswith(".py"):
            read.add(arguments[0])
sys.addaudithook(note)
import transformers
from transformers import models
from transformers.models.auto import tokenization_auto
assert set(finders) <= set(sys.meta_path)
assert not any("slipstream" in type(each).__module__ for each in sys.meta_path)
exports = []
for module in (transformers, models, models.auto):
    exports.append(sorted(dir(module)))
    exports.append(sorted(map(repr, module._class_to_module.items())))
    exports.append(sorted((name, sorted(what)) for name, what in module._import_structure.items()))
    exports.append(sorted((name, sorted(what))
                          for name, what in module._object_missing_backend.items()))
digest = hashlib.sha256(json.dumps(exports).encode()).hexdigest()
print(json.dumps([len(read), digest, len(exports[0])]))
"""


def _import(cache: Path, way: str) -> tuple[int, str, int]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, way],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    num_read, digest, num_names = json.loads(done.stdout)
    return num_read, digest, num_names


def test_the_cached_list_is_transformers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read, expected, num_names = _import(tmp_path, "plain")
    assert num_read > 1000
    assert num_names > 1000
    assert not any(tmp_path.iterdir())

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = find_spec("transformers")
    assert spec is not None
    path = _index_path(Path(str(spec.origin)).parent / "models")
    assert path is not None
    path.parent.mkdir()
    path.write_text('[[[], {"llama.configuration_llama": ["LlamaCon')  # damaged
    assert _import(tmp_path, "cached") == (num_read, expected, num_names)
    num_read, *same = _import(tmp_path, "cached")
    assert same == [expected, num_names]
    assert num_read < 20, "the list was made again"


def test_without_a_cache_it_is_made_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = _installed(tmp_path)
    (tmp_path / "slipstream").write_text("in the place of the folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    index = {frozenset({"torch"}): {"llama.modeling_llama": {"LlamaModel"}}, frozenset(): {}}
    asked = []

    def made(path: Path, prefix: str | None = None) -> object:
        asked.append((path, prefix))
        return index

    for _ in range(2):
        define = _with_cache(made, models)
        assert define(models) == index
        assert define(str(models / "__init__.py")) == index
        assert define(models, prefix="models") == {
            frozenset({"torch"}): {"models.llama.modeling_llama": {"LlamaModel"}},
            frozenset(): {},
        }
        define(models / "llama", prefix="m")
    assert asked == [(models, None), (models / "llama", "m")] * 2


def test_a_list_belongs_to_one_installation(tmp_path: Path) -> None:
    models = _installed(tmp_path)
    first = _index_path(models)
    assert first is not None
    assert _index_path(models) == first
    record = tmp_path / "transformers-5.17.0.dist-info" / "RECORD"
    record.write_text("another")
    assert _index_path(models) != first
    _installed(tmp_path, "5.18.0")
    assert _index_path(models) is None, "one of them is a leftover"
    assert _index_path(tmp_path / "checkout" / "src" / "transformers" / "models") is None


def _installed(folder: Path, version: str = "5.17.0") -> Path:
    """The folder of models of an installed package."""
    record = folder / f"transformers-{version}.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("one")
    models = folder / "transformers" / "models"
    models.mkdir(parents=True, exist_ok=True)
    return models
