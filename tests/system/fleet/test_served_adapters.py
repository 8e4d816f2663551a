"""`slipstream serve --replicas` with adapters that are changed over HTTP while processes are
killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.loras import ALL_LINEAR, Lora, save_lora
from tests.helpers.patience import PATIENCE_S, Patience
from tests.system.fleet.test_served_fleet import Served, served

from slipstream.demo_model import MODEL_PATH

pytestmark = pytest.mark.process

PROMPT = "def main("
GREEDY = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loras")
    save_lora(Lora(ALL_LINEAR, 8, 16, seed=1, std=0.05), MODEL_PATH, root / "tone")
    save_lora(Lora(("q_proj", "v_proj"), 4, 8, seed=2, std=0.2), MODEL_PATH, root / "sql")
    return root


def answered(fleet: Served, path: str, body: Any = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    address = f"http://127.0.0.1:{fleet.port}{path}"
    request = urllib.request.Request(address, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def load(fleet: Served, name: str, path: Path, **more: Any) -> tuple[int, str]:
    body = {"lora_name": name, "lora_path": str(path), **more}
    return answered(fleet, "/v1/load_lora_adapter", body)


def unload(fleet: Served, name: str) -> tuple[int, str]:
    return answered(fleet, "/v1/unload_lora_adapter", {"lora_name": name})


def text(fleet: Served, name: str) -> str:
    status, said = answered(fleet, "/v1/completions", {"model": name, "prompt": PROMPT, **GREEDY})
    assert status == 200, said
    found: str = json.loads(said)["choices"][0]["text"]
    return found


def served_by(fleet: Served, index: int) -> list[tuple[str, str]] | None:
    """The names and digests that a replica has noted as its own; None: it has noted none yet."""
    try:
        noted = json.loads((fleet.folder / f"replica-{index}" / "adapters").read_bytes())
    except FileNotFoundError:
        return None
    return sorted([(name, digest) for name, _, digest in noted["served"]])


def are_alike(fleet: Served) -> bool:
    first, second = (served_by(fleet, index) for index in range(2))
    return first is not None and first == second


def until_alike(fleet: Served) -> None:
    patience = Patience()
    while not are_alike(fleet):
        patience.wait("a replica that was away is told")


def test_changes_reach_all_replicas_while_processes_are_killed(root: Path) -> None:
    lora = ["--enable-lora", "--allow-runtime-lora-updating", "--lora-root", str(root)]
    alone = ["--device", "cpu", "--served-model-name", "base", "--threads", "1"]
    with served(*lora, *alone, "--http-workers", "2", model=str(MODEL_PATH)) as fleet:
        added = (200, "Success: LoRA adapter 'x' added successfully.")
        assert load(fleet, "x", root / "tone") == added
        tone = text(fleet, "x")
        assert load(fleet, "y", root / "sql")[0] == 200
        sql = text(fleet, "y")
        assert len({tone, sql, text(fleet, "base")}) == 3
        # either front, any replica
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda name: text(fleet, name), ["x"] * 16)) == {tone}
        rng, texts = random.Random(1), {"tone": tone, "sql": sql}
        for name, before in (("sql", "tone"), ("tone", "sql"), ("sql", "tone")):
            children = fleet.supervisor(rng.randrange(2)).children(recursive=True)
            with ThreadPoolExecutor(2) as pool:
                running = pool.submit(text, fleet, "x")
                change = pool.submit(load, fleet, "x", root / name, load_inplace=True)
                os.kill(rng.choice(children).pid, signal.SIGKILL)
                status, said = change.result()
                assert running.result() in (texts[name], texts[before])
            assert status == 200, said
            until_alike(fleet)
            assert text(fleet, "x") == texts[name]
        # a whole replica, which knows of nothing when it is back
        supervisor = fleet.supervisor(0)
        for process in [*supervisor.children(recursive=True), supervisor]:
            os.kill(process.pid, signal.SIGKILL)
        status, said = load(fleet, "x", root / "tone", load_inplace=True)
        assert status == 200, said
        assert text(fleet, "x") == tone
        fleet.said("replica-0 restarted")
        until_alike(fleet)
        assert unload(fleet, "x")[0] == 200
        for index in range(2):
            assert [name for name, _ in served_by(fleet, index) or []] == ["y"]
        assert answered(fleet, "/v1/completions", {"model": "x", "prompt": PROMPT})[0] == 404
        assert text(fleet, "y") == sql
