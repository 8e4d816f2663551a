"""A program: streams over two replicas, one of them behind a link that is taken down.

It runs in a network namespace of its own, which it may change: `unshare -n python -m …`. The lost
replica is in a namespace beside it. Prints the plain texts, the moved ones, and how many moved, as
one object of JSON.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.helpers.namespaces import NEAR, linked_machine, run
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.processes import started
from tests.helpers.stacks import spareless_stack

from slipstream import Client
from slipstream.cli.keys import make_folder
from slipstream.demo_model import MODEL_PATH

MODEL = f"simulated:step_ms=10,prefill_us=20,tokenizer={MODEL_PATH},mode=chain"
PROMPTS = [f"Chapter {n}: how names are bound, and where." for n in range(16)]
PARAMS = {"max_tokens": 200, "ignore_eos": True, "seed": 1}
HERE, THERE, PORT = "10.77.0.1", "10.77.0.2", 7001


def main() -> int:
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="lost-")))
        make_folder(folder / "keys")
        inside = opened.enter_context(linked_machine(HERE, THERE))
        remote = f"tcp://{THERE}:{PORT}"
        serve = f"{sys.executable} -m slipstream.cli.main serve {MODEL} --no-http"
        where = f"--runtime-dir {folder / 'run'} --listen {remote} --keys {folder / 'keys'}"
        server = opened.enter_context(
            started(
                shlex.split(f"{inside} {serve} {where} --spare-core false --no-spare-worker"),
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert server.stdout is not None
        assert any(line.startswith("serving at") for line in server.stdout)
        local = opened.enter_context(spareless_stack(MODEL))
        with local.client() as alone:
            plain = [each.text for each in alone.generate_many(PROMPTS, **PARAMS)]
        client = opened.enter_context(
            Client(f"{remote},{local.address}", keys=folder / "keys", timeout_s=PATIENCE_S)
        )
        patience = Patience()
        while len(client._io._cluster._moves.open_members()) < 2:
            client._io.connect().result()
            patience.wait("both replicas are attached")
        streams = [client.stream(prompt, **PARAMS) for prompt in PROMPTS]
        texts = [next(stream).text for stream in streams]
        run(f"ip link set {NEAR} down")
        texts = [
            text + "".join([delta.text for delta in stream])
            for text, stream in zip(texts, streams, strict=True)
        ]
        moved = [stream._state.moves for stream in streams]
        sys.stdout.write(json.dumps({"plain": plain, "texts": texts, "moves": moved}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
