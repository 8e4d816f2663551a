"""The prompt process: chat templates and tokenising, away from the hot loop.

Owns: the tokenizer and everything heavy that comes with it; compiling its decoder into the table
that the worker reads. Does not know: streams, clients. A bad prompt is an answer, not a death.

Why a process: both templates and `encode` hold the interpreter's lock; on a thread a long prompt
would stall every stream (DESIGN §1).
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import zmq
from msgspec import Struct
from tokenizers import Tokenizer

from slipstream_ipc.child import start_child
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.errors import BadRequest, brief
from slipstream_ipc.messages import Fault, PromptReady, Render, Rendered
from slipstream_worker.bad_words import bad_word_ids
from slipstream_worker.compile_table import UnsupportedDecoder, compile_table
from slipstream_worker.token_table import TableFileError, cache_path, load_table, save_table

logger = logging.getLogger(__name__)


class PromptConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a prompt process."""

    tokenizer: str  # a folder or a hub id
    address: str  # the worker's socket
    cache_dir: str
    trust_remote_code: bool = False


def main() -> int:
    """Answer until SIGTERM or the worker's death."""
    config, stop = start_child("prompts", PromptConfig)
    if not config.trust_remote_code:
        _do_without_torch()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(config.address)
    encode = msgspec.msgpack.Encoder().encode
    decoder = msgspec.msgpack.Decoder(Render)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(stop.fileno(), zmq.POLLIN)
    try:
        tokenizer = load_tokenizer(config)
        ready = prepare_table(tokenizer, Path(config.cache_dir))
    except (OSError, ValueError, KeyError, ImportError) as error:
        ready = PromptReady("", "", error=f"tokenizer {config.tokenizer!r}: {error}")
        tokenizer = None
    socket.send(encode(ready))
    while not stop.is_set:
        if dict(poller.poll()).get(socket):
            socket.send(encode(render(tokenizer, decoder.decode(socket.recv()))))
    socket.close()
    context.term()
    return 0


def _do_without_torch() -> None:
    """Transformers imports torch where it finds it; no tokenizer needs it, and it is most of the
    time that this process takes to start. Code from a model's folder may need it, though.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]  # what import takes for "not there"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it would warn that there is no torch


def load_tokenizer(config: PromptConfig) -> Any:
    """A fast transformers tokenizer. Raises OSError, ValueError where there is none."""
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(
        config.tokenizer, trust_remote_code=config.trust_remote_code
    )
    if not tokenizer.is_fast:
        raise ValueError("has no tokenizer.json; only such tokenizers are supported")
    return tokenizer


def prepare_table(tokenizer: Any, cache_dir: Path) -> PromptReady:
    """Compile the decoder, or find it compiled; also leaves the tokenizer.json for the fallback."""
    backend = cast(Tokenizer, tokenizer.backend_tokenizer)
    as_json = backend.to_str().encode()
    cache_dir.mkdir(parents=True, exist_ok=True)
    table_path = cache_path(cache_dir, as_json)
    json_path = table_path.with_suffix(".json")
    try:
        load_table(table_path)
    except (OSError, TableFileError):
        try:
            save_table(table_path, compile_table(backend))
        except UnsupportedDecoder as why_not:
            partial = json_path.with_suffix(".json.new")
            partial.write_bytes(as_json)
            partial.replace(json_path)
            return PromptReady(str(json_path), "", why_not=str(why_not))
    return PromptReady("", str(table_path))


def render(tokenizer: Any, request: Render) -> Rendered:
    """The ids of a prompt; whatever goes wrong is the answer to this request alone."""
    try:
        if request.messages:
            if not tokenizer.chat_template:
                fault = Fault("bad_request", "this model has no chat template", "messages")
                return Rendered(request.key, fault=fault)
            turns = [msgspec.to_builtins(message) for message in request.messages]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = [] if request.text is None else tokenizer(request.text)["input_ids"]
        words = bad_word_ids(tokenizer, request.bad_words)
    except BadRequest as error:
        return Rendered(request.key, fault=error.fault)
    except Exception as error:
        field = "messages" if request.messages else "prompt"
        # its caller is told more: the error may quote the prompt, which is in no log
        logger.debug("a prompt could not be rendered: %s", type(error).__name__)
        why = brief(f"{field}: {error}")
        return Rendered(request.key, fault=Fault("bad_request", why, field))
    return Rendered(
        request.key,
        pack_u32(np.asarray(ids, np.uint32)),
        bad_word_ids=pack_u32([token_id for word in words for token_id in word]),
        bad_word_counts=pack_u32([len(word) for word in words]),
    )


if __name__ == "__main__":
    # tearing down all that the tokenizer library imports takes most of a second, for nothing
    os._exit(main())
