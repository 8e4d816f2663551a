#!/usr/bin/env bash
# Versions:  safetensors 0.8.0, numpy 2.4.6 (Python 3.11 to 3.13).
# Guess:     `safetensors.numpy.load(data)`, of a file that is in memory already, makes views of these bytes, or copies
#            them with the GIL released: in a thread of a server that loads 200 MB beside its loop, it delays nobody.
# Behaviour: it copies all tensors in one call of its library, which holds the GIL: another thread stands still for
#            nearly as long as the call takes, 130 to 370 ms for 210 MB (busy, two cores). `safe_open` on the same
#            bytes (a file, or a memfd for bytes in memory) gives tensors one by one, and other threads go on between.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check safetensors==0.8.0 numpy==2.4.6
cat >"$folder/held.py" <<'PROGRAM'
import os
import sys
import threading
import time

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load, save

data = save({f"t{at}": np.ones((64, 4096), np.float32) for at in range(200)})
print(f"{len(data) / 1e6:.0f} MB in 200 tensors")


def at_once():
    return load(data)


def one_by_one():
    memory = os.memfd_create("tensors")
    os.write(memory, data)
    with safe_open(f"/proc/self/fd/{memory}", "np") as file:
        return [file.get_tensor(key) for key in file.keys()]


def share(call):
    """The longest time that another thread stood still while a call ran, of the time of the call."""
    gaps, is_over = [], threading.Event()

    def tick():
        last = time.perf_counter()
        while not is_over.is_set():
            time.sleep(0.0005)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    call()
    took = time.perf_counter() - begin
    is_over.set()
    thread.join()
    print(f"{call.__name__:10} {took * 1e3:4.0f} ms, of which another thread stood still for {max(gaps) * 1e3:.0f} ms")
    return max(gaps) / took


shares = {call.__name__: min(share(call) for _ in range(5)) for call in (at_once, one_by_one)}
is_so = shares["at_once"] > 0.7 and shares["one_by_one"] < 0.5 * shares["at_once"]
sys.exit(0 if is_so else f"the GIL is held otherwise now: {shares}")
PROGRAM
"$folder/venv/bin/python" "$folder/held.py"
