"""Unfolds a GGUF file and prints the folder: `python -m slipstream_core.model.gguf`.

Reads a request of JSON on stdin and writes one line of JSON: {"folder": …} or {"error": …}. The
api runs it before it starts a stack, whose processes then know of the folder alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from slipstream_core.model.gguf.folder import Overrides, unfold
from slipstream_core.model.gguf.source import Request, find_file, find_folder


def main() -> None:
    """Answer one request."""
    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
        file = find_file(request)
        overrides = Overrides(
            tokenizer=find_folder(request.tokenizer, "tokenizer.json", request),
            config=find_folder(request.config, "config.json", request),
        )
        answer = {"folder": str(unfold(file, overrides)), "file": str(Path(file).absolute())}
    except (OSError, ValueError, RuntimeError) as error:
        lines = str(error).strip().splitlines()
        answer = {"error": lines[0] if lines else type(error).__name__}
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
