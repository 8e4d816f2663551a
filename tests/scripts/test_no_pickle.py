"""The check that keeps pickle out: it finds every way in that we know of, and nothing else."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from tests.helpers.scripts import script_module


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return script_module("no_pickle")


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "if True:\n    def f():\n        import os, pickle as p",
        "import \\\n    pickle",
        "from pickle import loads as json_loads",
        "from _pickle import Unpickler",
        "import torch.multiprocessing as mp",
        "from torch import multiprocessing",
        "import torch\ntorch.multiprocessing.Queue()",
        "from multiprocessing.connection import Client",
        "from concurrent.futures import ProcessPoolExecutor",
        "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor()",
        "import joblib",
        "from joblib import load",
        "__import__('pickle')",
        "import importlib\nimportlib.import_module('marshal')",
        "from importlib import import_module\nname = 'dill'\nimport_module(name)",
        "import importlib\nimportlib.import_module('pic' + 'kle')",
        "import importlib\nimportlib.import_module(f'{kind}.pickle')",
        "import sys\nsys.modules['pickle'].loads(data)",
        "socket.recv_pyobj()",
        "getattr(socket, 'recv_pyobj')()",
        "socket.send_pyobj({})",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import numpy as np\nnp.load(path, allow_pickle=flag)",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import torch\ntorch.load(path, weights_only=flag)",
        "import torch\ntorch.save(x, path)",
        "import torch.distributed as dist\ndist.broadcast_object_list(x)",
        "import pandas\npandas.read_pickle(path)",
        "Model.from_pretrained(path, use_safetensors=False)",
    ],
)
def test_what_it_finds(check: ModuleType, source: str) -> None:
    assert list(check.findings(source, "somewhere.py")), source


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring may say pickle, and that we have none."""',
        "# import pickle",
        "import json, struct\njson.loads(data)",
        "import numpy as np\nnp.load(path)\nnp.load(path, allow_pickle=False)",
        "import torch\ntorch.load(path, weights_only=True)",
        "from concurrent.futures import Future, ThreadPoolExecutor",
        "import importlib\nimportlib.import_module('slipstream.llm')",
        "import importlib\nimportlib.import_module(f'slipstream.{name}')",
        "error = 'a pickled object'",
        "decoder.decode(data)\nwire.load()",
    ],
)
def test_what_it_lets_pass(check: ModuleType, source: str) -> None:
    assert list(check.findings(source, "somewhere.py")) == []


def test_it_says_where(check: ModuleType) -> None:
    assert list(check.findings("x = 1\nimport pickle\n", "a.py")) == [(2, "imports pickle")]


def test_there_is_no_pickle_here(check: ModuleType) -> None:
    assert check.main() == 0
    assert sys.modules.get("no_pickle") is None  # loaded by hand, left nowhere
