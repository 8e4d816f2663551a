"""No pickle: what crosses processes or comes from files is never turned into Python objects.

Reads the sources (not the tests) as syntax trees, so that no spelling of an import gets by, and
names what it finds: modules that unpickle, under whatever name they are imported; their names as
strings, by which they could be imported or looked up; methods and options of others that unpickle;
imports whose module cannot be read off the source. It keeps mistakes out, not somebody who means to
hide one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("api", "contrib", "engine_core", "ipc", "output_worker", "scripts", "benchmarks")

# modules that unpickle, or execute what they read; multiprocessing pickles what passes its pipes
MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "pickletools",
    "marshal",
    "shelve",
    "copyreg",
    "dill",
    "cloudpickle",
    "joblib",
    "multiprocessing",
    "concurrent.futures.process",
    "torch.multiprocessing",
    "torch.package",
}
# functions and methods of harmless modules
NAMES = {
    "recv_pyobj",
    "send_pyobj",
    "ProcessPoolExecutor",
    "read_pickle",
    "to_pickle",
    "load_pickle",
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
# options that turn the safe way off
OPTIONS = {"allow_pickle": True, "weights_only": False, "use_safetensors": False}

# imports by a name that is not in the source, and why that is right
DYNAMIC = {
    "api/slipstream/__init__.py": "modules of its own, from a table in the file",
    "api/slipstream/cli/options/parser.py": "the commands' modules, from tables in packages",
    "benchmarks/slipstream_lab/demo_model/corpus.py": "modules of the standard library, from a "
    "table in the file",
    "engine_core/slipstream_core/model/lean_imports.py": "modules of torch: it stands in for them",
    "ipc/slipstream_ipc/fork_server.py": "modules that its parent, the supervisor, would execute",
    "ipc/slipstream_ipc/other_python.py": "modules that its parent, the supervisor, would execute",
}
# what measures other engines measures their pickles, too
OTHERS = ROOT / "benchmarks" / "slipstream_lab" / "peers"


def findings(source: str, path: str) -> Iterator[tuple[int, str]]:
    """Each line that unpickles, or could, and what it does there."""
    for node in ast.walk(ast.parse(source, path)):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if _is_banned(alias.name):
                        yield line, f"imports {alias.name}"
            case ast.ImportFrom(module=module, names=names):
                for alias in names:
                    full = f"{module}.{alias.name}"
                    if _is_banned(module or "") or _is_banned(full) or alias.name in NAMES:
                        yield line, f"imports {full}"
            case ast.Attribute(attr=name) if name in NAMES:
                yield line, f"uses {name}"
            case ast.Name(id=name) if name in NAMES:
                yield line, f"uses {name}"
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                if _is_banned(f"{module}.{name}"):
                    yield line, f"uses {module}.{name}"
            case ast.Constant(value=str(text)) if _is_banned(text) or text in NAMES:
                yield line, f"names {text!r}"
            case ast.keyword(arg=str(name), value=value) if name in OPTIONS:
                if not (isinstance(value, ast.Constant) and value.value is (not OPTIONS[name])):
                    yield value.lineno, f"sets {name}"
            case ast.Call(func=func):
                yield from ((line, what) for what in _of_call(node, func, path))


def _is_banned(module: str) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:num]) in MODULES for num in range(1, len(parts) + 1))


def _of_call(call: ast.Call, func: ast.expr, path: str) -> Iterator[str]:
    name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
    if name in ("import_module", "__import__", "run_module", "run_path", "load_module"):
        given = call.args[0] if call.args else None
        if isinstance(given, ast.JoinedStr) and given.values:  # f"slipstream.{name}"
            given = given.values[0]
        if not (isinstance(given, ast.Constant) and isinstance(given.value, str)):
            if path not in DYNAMIC:
                yield f"{name} of a module that is not named in the source"
        elif isinstance(call.args[0], ast.JoinedStr) and not given.value.startswith("slipstream"):
            yield f"{name} of a module that is not named in the source"
    is_torch = isinstance(func, ast.Attribute) and ast.unparse(func) in ("torch.load", "torch.save")
    if is_torch and "weights_only" not in {keyword.arg for keyword in call.keywords}:
        yield f"calls {ast.unparse(func)} without weights_only=True"


def main() -> int:
    """Exit code 1 where there is something."""
    found = 0
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = str(file.relative_to(ROOT))
            if file == Path(__file__).resolve() or file.is_relative_to(OTHERS):
                continue
            for line, what in findings(file.read_text(encoding="utf-8"), path):
                sys.stderr.write(f"{path}:{line}: {what}\n")
                found += 1
    if found:
        sys.stderr.write("what crosses processes or comes from files is never unpickled\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
