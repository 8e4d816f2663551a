"""Adapters are loaded, replaced and unloaded while streams run and processes die: each stream says
what the merged model of the version that it began with says.
"""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from tests.helpers.loras import ALL_LINEAR, Lora, save_lora, save_merged
from tests.helpers.patience import PATIENCE_S

from slipstream_core.config import LoraConfig
from slipstream_ipc.messages import WANTS_ADAPTERS, AdapterChanged
from slipstream_ipc.worker_deal import worker_address
from slipstream_lab.models import tiny_models

LORAS = (Lora(ALL_LINEAR, 8, 16, seed=1), Lora(("q_proj", "v_proj"), 16, 32, seed=2))
PROMPTS = [[5 + 7 * row + 3 * at for at in range(4 + 9 * row)] for row in range(2)]
NUM_OUTPUTS = 30


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two adapters, and the models that these are merged into."""
    folder = tmp_path_factory.mktemp("loras")
    (tiny,) = [each for each in tiny_models.ARCHITECTURES if each.name == "Llama"]
    tiny_models.save(tiny, folder / "base")
    for at, each in enumerate(LORAS):
        save_lora(each, folder / "base", folder / f"a{at}")
        save_merged(each, folder / "base", folder / f"merged{at}")
    return folder


@pytest.fixture
def loras(saved: Path, tmp_path: Path) -> Path:
    """A root with a copy of the adapters, and an empty folder for a stack beside it."""
    root = tmp_path / "root"
    for name in ("a0", "a1"):
        shutil.copytree(saved / name, root / name)
    (tmp_path / "stack").mkdir()
    return root


def open_stack(
    make_stack: Any,
    model: Path,
    loras: Path | None = None,
    num_workers: int | None = None,
    **options: Any,
) -> Any:
    torch.set_num_threads(1)
    lora, own = None, dict[str, Any]()
    if loras is not None:
        given = {"is_updatable": True, "roots": (str(loras),), "max_loras": 4, **options}
        lora = LoraConfig(max_rank=16, **given)
        own = {"runtime_dir": str(loras.parent / "stack")}
    if num_workers is not None:
        own["num_workers"] = num_workers
    return make_stack(
        model=str(model),
        device="cpu",
        dtype="float32",
        max_model_len=tiny_models.MAX_MODEL_LEN,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        block_size=4,
        num_blocks=200,
        threads=1,
        lora=lora,
        **own,
    )


def submit(stack: Any, name: str, client: Any = None) -> list[Any]:
    client = client or stack.client()
    params = {"max_tokens": NUM_OUTPUTS, "ignore_eos": True, "detokenize": False}
    return [client.submit(prompt, adapter=name, **params) for prompt in PROMPTS]


def has_read(streams: list[Any], num_outputs: int) -> bool:
    return max(len(it.token_ids) for it in streams) >= num_outputs


def are_over(streams: list[Any]) -> bool:
    return all(it.is_over for it in streams)


def ids(streams: list[Any]) -> list[list[int]]:
    return [it.token_ids for it in streams]


def said(stack: Any, name: str) -> list[list[int]]:
    streams = submit(stack, name)
    stack.until(partial(are_over, streams))
    assert [it.fault for it in streams] == [None, None]
    return ids(streams)


@pytest.fixture
def expected(make_stack: Any, saved: Path) -> dict[str, list[list[int]]]:
    """The texts of the base and of each merged model."""
    models = {"": "base", "a0": "merged0", "a1": "merged1"}
    return {name: said(open_stack(make_stack, saved / model), "") for name, model in models.items()}


def restart(stack: Any, which: str) -> None:
    getattr(stack, f"kill_{which}")()
    for _ in range(5):
        stack.step()
    getattr(stack, f"start_{which}")()


def names(stack: Any) -> list[str]:
    stack.until(lambda: stack.worker.card is not None)
    return [each.name for each in stack.worker.card.adapters]


def test_what_is_loaded_is_the_merged_model(
    make_stack: Any, saved: Path, loras: Path, expected: dict[str, Any]
) -> None:
    stack = open_stack(make_stack, saved / "base", loras)
    client, other = stack.client(wants=WANTS_ADAPTERS), stack.client(wants=WANTS_ADAPTERS)
    silent = stack.client()  # of another release: it is told nothing that it does not know
    stack.until(lambda: all(each.welcome is not None for each in (client, other, silent)))
    (early, _) = submit(stack, "x")
    stack.until(lambda: early.is_over)
    assert early.fault.field == "model"
    assert client.change("x", str(loras / "a0")) == AdapterChanged(0)
    assert said(stack, "x") == expected["a0"]
    for each in (client, other):
        assert [(it.name, it.path) for it in each.served[-1].adapters] == [("x", f"{loras}/a0")]
    assert not silent.served
    running = submit(stack, "x")
    stack.until(partial(has_read, running, 5))
    changed = client.change("x")
    assert (changed.fault, changed.num_streams) == (None, 2)
    late = submit(stack, "x")
    stack.until(partial(are_over, [*running, *late]))
    assert ids(running) == expected["a0"]
    assert [it.fault.field for it in late] == ["model"] * 2
    assert said(stack, "") == expected[""]
    assert client.served[-1].adapters == ()


def test_what_is_answered_is_known_to_all(make_stack: Any, saved: Path, loras: Path) -> None:
    """To other workers and their clients: none of them refuses a name that has been loaded."""
    stack = open_stack(make_stack, saved / "base", loras, num_workers=2)
    addresses = [worker_address(stack.client_address, at) for at in (0, 1)]
    clients = [stack.client(address, wants=WANTS_ADAPTERS) for address in addresses * 2]
    stack.until(lambda: all(each.welcome is not None for each in clients))
    for at, each in enumerate(clients):
        assert each.change(f"x{at}", str(loras / "a0")).fault is None
        served = [f"x{number}" for number in range(at + 1)]
        for worker in stack.workers:
            assert [it.name for it in worker.card.adapters] == served
        for other in clients:
            assert [it.name for it in other.served[-1].adapters] == served
    # one that does not say so, and one that has gone, hold it up for a second at most
    clients[1].tells_what_it_knows = False
    assert clients[0].change("x0").fault is None
    stack.kill(1)
    assert clients[0].change("x1").fault is None
    stack.start(1)
    assert clients[2].change("x2").fault is None
    stack.until(lambda: names(stack) == ["x3"])


def test_no_stream_waits_for_files(
    make_stack: Any, saved: Path, loras: Path, expected: dict[str, Any], monkeypatch: Any
) -> None:
    """Streams begin and end while an adapter is read, also of one that was loaded before."""
    stack = open_stack(make_stack, saved / "base", loras)
    client, is_free = stack.client(), Event()
    assert client.change("x", str(loras / "a0")).fault is None
    store = stack.core.changes.store
    read = store.read

    def slow(*arguments: Any) -> Any:
        assert is_free.wait(PATIENCE_S)
        return read(*arguments)

    monkeypatch.setattr(store, "read", slow)
    number = client.send_change("y", str(loras / "a1"))
    assert said(stack, "x") == expected["a0"]
    assert said(stack, "") == expected[""]
    assert number not in client.changed
    is_free.set()
    stack.until(lambda: number in client.changed)
    assert said(stack, "y") == expected["a1"]


def test_a_name_that_is_loaded_anew_says_what_is_new(
    make_stack: Any, saved: Path, loras: Path, expected: dict[str, Any]
) -> None:
    """By the same path, with other tensors: nothing of before is found in the prefix cache."""
    stack = open_stack(make_stack, saved / "base", loras)
    client, path = stack.client(), str(loras / "a0")
    assert client.change("x", path).fault is None
    assert said(stack, "x") == expected["a0"]
    running = submit(stack, "x")
    stack.until(partial(has_read, running, 7))
    shutil.copytree(saved / "a1", loras / "a0", dirs_exist_ok=True)
    refused = client.change("x", path).fault
    assert refused is not None
    assert "which is loaded" in refused.message
    assert "load_inplace" in refused.message
    changed = client.change("x", path, load_inplace=True)
    assert (changed.fault, changed.num_streams) == (None, 2)
    assert said(stack, "x") == expected["a1"]
    stack.until(partial(are_over, running))
    assert ids(running) == expected["a0"]
    # nothing changes where the files have not
    assert client.change("x", path, load_inplace=True) == AdapterChanged(3)
    assert said(stack, "x") == expected["a1"]


@pytest.mark.parametrize("killed", ["core", "worker"])
def test_changes_outlive_processes(
    make_stack: Any, saved: Path, loras: Path, expected: dict[str, Any], killed: str
) -> None:
    """Names are served by the successor, and streams of a version that no name has go on with it,
    as long as its files are there.
    """
    stack = open_stack(make_stack, saved / "base", loras)
    client = stack.client(wants=WANTS_ADAPTERS)
    for name in ("a0", "a1"):
        assert client.change(name, str(loras / name)).fault is None
    unloaded, kept = submit(stack, "a0"), submit(stack, "a1")
    stack.until(partial(has_read, [*unloaded, *kept], 5))
    assert client.change("a0").num_streams == 2
    restart(stack, killed)
    stack.until(partial(are_over, [*unloaded, *kept]))
    assert ids(unloaded) == expected["a0"]
    assert ids(kept) == expected["a1"]
    assert names(stack) == ["a1"]
    assert said(stack, "a1") == expected["a1"]
    assert client.change("a0", str(loras / "a0")).fault is None
    assert said(stack, "a0") == expected["a0"]


def test_both_die_and_names_are_served(
    make_stack: Any, saved: Path, loras: Path, expected: dict[str, Any]
) -> None:
    stack = open_stack(make_stack, saved / "base", loras)
    client = stack.client()
    assert client.change("x", str(loras / "a0")).fault is None
    running = submit(stack, "x")
    stack.until(partial(has_read, running, 5))
    stack.kill_core()
    stack.kill_worker()
    stack.start_core()
    stack.start_worker()
    stack.until(partial(are_over, running))
    assert ids(running) == expected["a0"]
    assert names(stack) == ["x"]


@pytest.mark.parametrize("killed", ["core", "worker"])
def test_a_change_that_was_not_answered_is_made_once(
    make_stack: Any, saved: Path, loras: Path, killed: str
) -> None:
    """Whatever of it had been done: it is asked of the successor, and not refused as done."""
    for num_steps in range(0, 12, 2):
        stack = open_stack(make_stack, saved / "base", loras)
        client = stack.client()
        stack.until(lambda client=client: client.welcome is not None)
        number = client.send_change("x", str(loras / "a0"))
        for _ in range(num_steps):
            stack.step()
        restart(stack, killed)
        stack.until(lambda number=number, client=client: number in client.changed)
        assert client.changed[number].fault is None
        assert names(stack) == ["x"]
        number = client.send_change("x")
        for _ in range(num_steps):
            stack.step()
        restart(stack, killed)
        stack.until(lambda number=number, client=client: number in client.changed)
        assert client.changed[number].fault is None
        assert names(stack) == []


def test_a_version_whose_files_were_replaced_ends_its_streams(
    make_stack: Any, saved: Path, loras: Path, expected: dict[str, Any]
) -> None:
    stack = open_stack(make_stack, saved / "base", loras)
    client, path = stack.client(), str(loras / "a0")
    assert client.change("x", path).fault is None
    old = submit(stack, "x")
    stack.until(partial(has_read, old, 5))
    shutil.copytree(saved / "a1", loras / "a0", dirs_exist_ok=True)
    assert client.change("x", path, load_inplace=True).num_streams == 2
    new = submit(stack, "x")
    stack.until(partial(has_read, new, 5))
    restart(stack, "core")
    stack.until(partial(are_over, [*old, *new]))
    assert ids(new) == expected["a1"]
    for it, whole in zip(old, expected["a0"], strict=True):
        assert it.end.fault.code == "diverged"
        assert it.token_ids == whole[: len(it.token_ids)]


def test_what_cannot_be_loaded_changes_nothing(
    make_stack: Any, saved: Path, loras: Path, expected: dict[str, Any]
) -> None:
    stack = open_stack(make_stack, saved / "base", loras)
    client, outside = stack.client(), loras.parent / "outside"
    shutil.copytree(saved / "a0", outside)
    (loras / "out").symlink_to(outside)
    shutil.copytree(saved / "a0", loras / "files-out")
    (loras / "files-out" / "adapter_model.safetensors").unlink()
    (loras / "files-out" / "adapter_model.safetensors").symlink_to(
        outside / "adapter_model.safetensors"
    )
    shutil.copytree(saved / "a0", loras / "pickled")
    weights = loras / "pickled" / "adapter_model.safetensors"
    weights.rename(loras / "pickled" / "adapter_model.bin")
    shutil.copytree(saved / "a0", loras / "torn")
    weights = loras / "torn" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (loras / "empty").mkdir()
    assert client.change("a0", str(loras / "a0")).fault is None
    base = stack.worker.card.name
    for name, path, why, says in (
        ("y", str(outside), "forbidden", "allowed: folders below"),
        ("y", str(loras / ".." / "outside"), "forbidden", "allowed: folders below"),
        ("y", str(loras / "out"), "forbidden", "allowed: folders below"),
        ("y", str(loras / "files-out"), "forbidden", "a link out of them"),
        ("y", "org/name", "forbidden", "nothing is fetched"),
        ("y", str(loras) + "-2", "forbidden", "allowed: folders below"),
        ("y", "/nowhere", "forbidden", "allowed: folders below"),
        ("y", "a\0b", "", "null byte"),
        ("y", str(loras / "none"), "missing", "there is no folder"),
        ("y", str(loras / "empty"), "missing", "adapter_config.json is missing"),
        ("y", str(loras / "pickled"), "", "pickles, which are never read"),
        ("y", str(loras / "torn"), "", "adapter_model.safetensors: cannot be read"),
        ("", str(loras / "a1"), "", "a name of 1 to 128"),
        ("y*", str(loras / "a1"), "", "without * at its end"),
        (base, str(loras / "a1"), "", "names that the model has not"),
        ("a0", str(loras / "a0"), "", "which is loaded"),
        ("y", "", "missing", "allowed: names of adapters that are loaded"),
        ("y", "/" * 5000, "", "at most 4096"),
    ):
        changed = client.change(name, path)
        assert changed.fault is not None, path
        assert (changed.why, says in changed.fault.message) == (why, True), changed
        assert "\n" not in changed.fault.message
        assert names(stack) == ["a0"]
    assert said(stack, "a0") == expected["a0"]


def test_room_is_made_by_those_that_no_stream_has(
    make_stack: Any, saved: Path, loras: Path, expected: dict[str, Any]
) -> None:
    stack = open_stack(make_stack, saved / "base", loras, max_loras=1)
    client = stack.client()
    assert client.change("x", str(loras / "a0")).fault is None
    running = submit(stack, "x")
    stack.until(partial(has_read, running, 3))
    full = client.change("y", str(loras / "a1"))
    assert (full.why, full.fault.code) == ("no_room", "overloaded")
    assert "loaded: 'x'" in full.fault.message
    assert client.change("x").num_streams == 2
    assert client.change("y", str(loras / "a1")).why == "no_room"  # streams still have it
    stack.until(partial(are_over, running))
    assert ids(running) == expected["a0"]
    assert client.change("y", str(loras / "a1")).fault is None
    assert said(stack, "y") == expected["a1"]


def test_memory_is_bounded(make_stack: Any, saved: Path, loras: Path) -> None:
    stack = open_stack(make_stack, saved / "base", loras, gib=1e-6)
    full = stack.client().change("x", str(loras / "a0"))
    assert full.why == "no_room"
    assert "--lora-gib" in full.fault.message


@pytest.mark.parametrize(
    ("lora", "why", "says"),
    [
        (None, "missing", "--enable-lora"),
        ({"is_updatable": False}, "forbidden", "--allow-runtime-lora-updating"),
        ({"roots": ()}, "forbidden", "allowed: folders below none"),
    ],
)
def test_adapters_change_only_where_options_say_so(
    make_stack: Any, saved: Path, loras: Path, lora: Any, why: str, says: str
) -> None:
    if lora is None:
        stack = open_stack(make_stack, saved / "base")
    else:
        stack = open_stack(make_stack, saved / "base", loras, **lora)
    changed = stack.client().change("x", str(loras / "a0"))
    assert (changed.why, says in changed.fault.message) == (why, True), changed


def test_a_tokenizer_in_the_folder_is_told_of(make_stack: Any, saved: Path, loras: Path) -> None:
    stack = open_stack(make_stack, saved / "base", loras)
    client = stack.client()
    (loras / "a0" / "tokenizer.json").write_text("{}")
    assert "tokenizer is used, not tokenizer.json" in client.change("x", f"{loras}/a0").warning
    (loras / "a1" / "added_tokens.json").write_text('{"<new>": 1000000}')
    refused = client.change("y", str(loras / "a1"))
    assert refused.fault is not None
    assert "'<new>' has the id 1000000, allowed: ids of the base" in refused.fault.message


@pytest.mark.parametrize("seed", range(3))
def test_changes_beside_kills_leave_each_stream_its_version(
    make_stack: Any, saved: Path, loras: Path, expected: dict[str, Any], seed: int
) -> None:
    """Loads, reloads and unloads at random, beside deaths of core, worker and both."""
    chance = random.Random(seed)
    stack = open_stack(make_stack, saved / "base", loras)
    client, served, running = stack.client(), dict[str, str](), list[tuple[Any, list[int]]]()
    for _ in range(25):
        what = chance.choice(("load", "load", "unload", "submit", "submit", "submit", "kill"))
        name = chance.choice(("x", "y"))
        if what == "load":
            of = chance.choice(("a0", "a1"))
            assert client.change(name, f"{loras}/{of}", load_inplace=True).fault is None
            served[name] = of
        elif what == "unload":
            assert (client.change(name).fault is None) == (name in served)
            served.pop(name, None)
        elif what == "submit":
            streams = submit(stack, name, client)
            stack.until(lambda streams=streams: all(it.token_ids or it.is_over for it in streams))
            if name in served:
                running += zip(streams, expected[served[name]], strict=True)
            else:
                assert [it.fault.field for it in streams] == ["model"] * 2
        else:
            for killed in chance.choice((["core"], ["worker"], ["core", "worker"])):
                getattr(stack, f"kill_{killed}")()
            if stack.core is None:
                stack.start_core()
            if stack.worker is None:
                stack.start_worker()
        for _ in range(chance.randrange(12)):
            stack.step()
    assert sorted(names(stack)) == sorted(served)
    stack.until(lambda: all(it.is_over for it, _ in running))
    for it, whole in running:
        assert it.fault is None
        assert it.end.fault is None
        assert it.token_ids == whole
