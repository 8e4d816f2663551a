"""A client in an interpreter with no third-party packages but msgspec, pyzmq and numpy: asks the
server at the address given, with `Client` and `AsyncClient`, and writes what it loaded.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import json
import sys
from collections.abc import Sequence
from typing import Any

ALLOWED = {"msgspec", "zmq", "numpy", "slipstream", "slipstream_ipc"}
OF_PYTHON = ("__editable", "_sysconfigdata")  # names that change with the installation


class Blocked(importlib.abc.MetaPathFinder):
    """Finds nothing but the standard library and `ALLOWED`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        """Raise ModuleNotFoundError for what is not allowed; others find the rest."""
        top = fullname.partition(".")[0]
        if not (top in sys.stdlib_module_names or top in ALLOWED or top.startswith(OF_PYTHON)):
            raise ModuleNotFoundError(f"No module named {top!r} here", name=top)


def main(address: str) -> None:
    """Ask with both clients."""
    sys.meta_path.insert(0, Blocked())
    import slipstream

    chat = [{"role": "user", "content": "hi"}]
    texts = []
    with slipstream.Client(address) as client:
        texts += [client.generate("x", max_tokens=4).text, client.generate(chat).text]
        texts += ["".join(delta.text for delta in client.stream("x", max_tokens=4))]
        texts += [output.text for output in client.generate_many(["x", "y"], max_tokens=4)]
        form = slipstream.StructuredOutputs(json={"type": "object"})
        texts += [client.generate("x", slipstream.SamplingParams(structured_outputs=form)).text]

    async def ask() -> None:
        async with slipstream.AsyncClient(address) as client:
            texts.append((await client.generate("x", max_tokens=4)).text)
            texts.append("".join([d.text async for d in client.stream("x", max_tokens=4)]))

    asyncio.run(ask())
    loaded = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
    sys.stdout.write(json.dumps([texts, sorted(loaded & ALLOWED)]))


if __name__ == "__main__":
    main(sys.argv[1])
