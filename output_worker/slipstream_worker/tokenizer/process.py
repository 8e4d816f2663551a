"""The tokenizer process: renders prompts (`prompt_rendering`), away from the worker's loop.

Loads the tokenizer, and compiles its decoder to the table that the worker reads, with beats
meanwhile. A bad prompt results in an error answer; it does not end the process.

It is a process because templates hold the interpreter's lock, and so does building Python lists of
token ids; tokenising itself releases it. On a thread of the worker, a text that takes 3.2 s stalled
every stream for up to 98 ms, and a template for as long as it ran. Here it stalls only other
prompts, so long ones have threads of their own (`long_prompts`).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import zmq
from msgspec import Struct
from msgspec.structs import replace
from tokenizers import Tokenizer

from slipstream_ipc.atomic_file import write_atomically
from slipstream_ipc.damaged_file import refuse_placeholder
from slipstream_ipc.errors import BadRequest, brief
from slipstream_ipc.formats.answer_format import AnswerFormat, delimiters
from slipstream_ipc.formats.choose import choose_format, delimiter_ids
from slipstream_ipc.formats.table import find_format, forced_format
from slipstream_ipc.hub_id import split_revision
from slipstream_ipc.messages import Render, Rendered, TokenizerReady
from slipstream_ipc.process import BEAT_S, freeze_gc, start_child
from slipstream_ipc.tokenizer_file import follow_tokenizer_file
from slipstream_ipc.transformers_index import use_cached_index
from slipstream_worker.detokenizer.compiler import UnsupportedDecoder, compile_table
from slipstream_worker.detokenizer.panics import is_panic
from slipstream_worker.detokenizer.slow_compiler import compile_slow, slow_pieces
from slipstream_worker.detokenizer.table import TableFileError, cache_path, load_table, save_table
from slipstream_worker.tokenizer.answer_settings import ReadFormat, read_format
from slipstream_worker.tokenizer.end_tokens import end_token_ids
from slipstream_worker.tokenizer.image_placeholders import NoPicturesError, load_placeholders
from slipstream_worker.tokenizer.long_prompts import NUM_LANES, LongPromptThread, lane_of
from slipstream_worker.tokenizer.prompt_rendering import ChatTraits, render
from slipstream_worker.tokenizer.render_note import RenderNote
from slipstream_worker.tokenizer.template_dialect import find_dialect, find_refused_shapes

logger = logging.getLogger(__name__)

_CONVERTERS = ("sentencepiece", "tiktoken")  # which transformers needs for other file formats
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_TOOLS = re.compile(r"\btools\b")
_RECONNECT_MS = 5
_LAST_WORDS_MS = 1000  # linger for the error message


class TokenizerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a tokenizer process."""

    tokenizer: str  # a folder or a hub id
    address: str  # the worker's socket
    cache_dir: str
    note_fd: int | None = None  # descriptor of its `RenderNote`
    trust_remote_code: bool = False
    tool_format: str | None = None  # as in WorkerConfig
    reasoning_format: str | None = None
    chat_template: str | None = None
    default_chat_template_kwargs: dict[str, Any] = {}


def main() -> int:
    """Answer until SIGTERM or the worker's death. Returns 1 if the tokenizer cannot be loaded."""
    config, stop = start_child("tokenizer", TokenizerConfig)
    if not config.trust_remote_code and "torch" not in sys.modules:
        do_without_torch()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)  # a fork may be earlier than its worker
    socket.connect(config.address)
    encode = msgspec.msgpack.Encoder().encode
    decoder = msgspec.msgpack.Decoder(Render)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(stop.fileno(), zmq.POLLIN)
    note = RenderNote(config.note_fd)
    with beating(note):
        tokenizer, ready = prepare(config)
        traits = ChatTraits()
        if not ready.error:
            kwargs = config.default_chat_template_kwargs
            traits = chat_traits(tokenizer, ready)._replace(
                template_kwargs=kwargs, pair_template=config.chat_template
            )
            try:
                placeholders = load_placeholders(tokenizer, config.tokenizer)
                traits = traits._replace(placeholders=placeholders)
            except NoPicturesError as error:
                ready = replace(ready, why_no_images=str(error))
            eos = end_token_ids(tokenizer, traits.dialect, _delimiters(ready))
            ready = replace(ready, eos_token_ids=eos)
    freeze_gc(collects=False)  # parsing a vocabulary leaves free memory behind
    socket.send(encode(replace(ready, pid=os.getpid())))
    if ready.error:
        socket.close(linger=_LAST_WORDS_MS)
        context.term()
        return 1

    def render_noted(lane: int, request: Render) -> Rendered:
        note.begin(request.key, lane=lane)
        answer = render(tokenizer, request, traits)
        note.end(lane=lane)  # not if it raises: the note then names the cause
        return answer

    threads = {lane: LongPromptThread(partial(render_noted, lane)) for lane in range(1, NUM_LANES)}
    for thread in threads.values():
        poller.register(thread.fileno(), zmq.POLLIN)
    beat_at = 0.0
    while not stop.is_set:
        arrived = dict(poller.poll(int(BEAT_S * 1e3)))
        now = monotonic()
        if now >= beat_at:
            beat_at = now + BEAT_S / 2
            note.beat()
        if arrived.get(socket):
            request = decoder.decode(socket.recv())
            lane = lane_of(request)
            if lane:
                threads[lane].put(request)
            else:
                socket.send(encode(render_noted(lane, request)))
        for thread in threads.values():
            if arrived.get(thread.fileno()):
                for answer in thread.take_rendered():
                    socket.send(encode(answer))
    socket.close()
    context.term()
    return 0


@contextlib.contextmanager
def beating(note: RenderNote) -> Iterator[None]:
    """Note beats from a thread; the caller notes none meanwhile."""
    is_over = threading.Event()

    def note_beats() -> None:
        while not is_over.wait(BEAT_S / 2):
            note.beat()

    thread = threading.Thread(target=note_beats, name="beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def do_without_torch() -> None:
    """Keep transformers from importing torch, which takes most of this process's start-up time and
    which no tokenizer needs. Not called with trust_remote_code: code from a model's folder may need
    torch.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes imports fail
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it would warn about the missing torch


def prepare(config: TokenizerConfig) -> tuple[Any, TokenizerReady]:
    """The tokenizer, and the TokenizerReady for the worker: its table's path, or the error."""
    try:
        for name in _FILES:
            if (file := Path(config.tokenizer) / name).is_file():
                refuse_placeholder(file)
        tokenizer = load_tokenizer(config)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        # for a broken tokenizer.json the libraries may raise a bare KeyError
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        said = brief(" ".join(str(error).split()))
        why = f"cannot load the tokenizer {config.tokenizer!r} ({kind}{said}); allowed: a folder "
        why += "or hub id with a valid tokenizer.json, the model's own or that of --tokenizer"
        missing = [name for name in _CONVERTERS if find_spec(name) is None]
        if missing:
            why += f"; a tokenizer.model or tiktoken file needs {', '.join(missing)}: "
            why += "pip install 'slipstream[tokenizers]'"
        return None, TokenizerReady("", "", error=why)
    try:
        ready = prepare_table(tokenizer, Path(config.cache_dir))
    except OSError as error:
        why = f"cannot write the cache folder: {error} (set XDG_CACHE_HOME to use another)"
        return None, TokenizerReady("", "", error=why)
    if ready.error:
        return tokenizer, ready
    try:
        return tokenizer, _with_format(ready, tokenizer, config)
    except BadRequest as error:
        return None, TokenizerReady("", "", error=error.fault.message)


def _with_format(ready: TokenizerReady, tokenizer: Any, config: TokenizerConfig) -> TokenizerReady:
    """Choose the format of the model's answers. Raises: BadRequest for an unknown name."""
    added_tokens: dict[str, int] = tokenizer.get_added_vocab()
    choice = choose_format(
        tokenizer.chat_template,
        added_tokens,
        tool_format=config.tool_format,
        reasoning_format=config.reasoning_format,
        response_template=getattr(tokenizer, "response_template", None),
    )
    advice = "`slipstream formats` lists those that --tool-format and --reasoning-format can name"
    if choice.is_ambiguous:
        why = " ".join(dict.fromkeys((choice.reasoning, choice.calls)))
        logger.warning("answers are not taken apart, or in part: %s; %s", why, advice)
    elif choice.format is None and _TOOLS.search(str(tokenizer.chat_template or "")):
        logger.info("answers are not taken apart: %s; %s", choice.calls, advice)
    return replace(
        ready,
        answer_format="" if choice.format is None else choice.format.name,
        delimiter_ids=delimiter_ids(added_tokens),
    )


def chat_traits(tokenizer: Any, ready: TokenizerReady) -> ChatTraits:
    """The properties of the tokenizer's chats that `render` needs."""
    found = find_format(ready.answer_format)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def id_of(text: str) -> int | None:
        if not text.isascii() or not text.isprintable() or " " in text:
            return None  # vocabularies write these in other ways
        token_id: int | None = tokenizer.convert_tokens_to_ids(text)
        is_known = token_id is not None and tokenizer.convert_ids_to_tokens(token_id) == text
        return token_id if is_known else None

    def read(each: AnswerFormat | None) -> ReadFormat | None:
        return None if each is None else read_format(each, ready.delimiter_ids, encode, id_of)

    dialect = find_dialect(tokenizer)
    return ChatTraits(
        dialect,
        read(found),
        find_refused_shapes(tokenizer, dialect),
        read(forced_format(found)),
    )


def _delimiters(ready: TokenizerReady) -> tuple[str, ...]:
    found = find_format(ready.answer_format)
    return () if found is None else tuple(each.literal for each in delimiters(found))


def import_libraries() -> None:
    """Import what `load_tokenizer` needs; a fork need not do it again."""
    use_cached_index()
    importlib.import_module("transformers.models.auto.tokenization_auto")


def load_tokenizer(config: TokenizerConfig) -> Any:
    """A transformers tokenizer. Raises whatever the libraries raise if it cannot be loaded."""
    import_libraries()
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    # it writes lines itself and propagates them to our log, which would repeat them
    logging.getLogger("huggingface_hub").handlers.clear()
    name, revision = split_revision(config.tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(
        name, revision=revision, trust_remote_code=config.trust_remote_code
    )
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    follow_tokenizer_file(tokenizer, name, revision=revision)
    if tokenizer.is_fast:
        # as its first call would; nothing changes it afterwards, so several threads may call it
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def prepare_table(tokenizer: Any, cache_dir: Path) -> TokenizerReady:
    """Find the compiled decoder in the cache, or compile it.

    If no table can represent it, writes tokenizer.json for the window. Raises OSError.
    """
    if not tokenizer.is_fast:
        return _prepare_slow(tokenizer, cache_dir)
    backend: Tokenizer = tokenizer.backend_tokenizer
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
            write_atomically(json_path, as_json)
            return TokenizerReady(str(json_path), "", why_not=str(why_not))
    return TokenizerReady("", str(table_path))


def _prepare_slow(tokenizer: Any, cache_dir: Path) -> TokenizerReady:
    """`prepare_table` for a tokenizer that transformers runs in Python, which has no fallback."""
    name = type(tokenizer).__name__
    try:
        pieces = slow_pieces(tokenizer)
        path = cache_path(cache_dir, msgspec.msgpack.encode((name, pieces)))
        try:
            load_table(path)
        except (OSError, TableFileError):
            save_table(path, compile_slow(tokenizer, pieces))
    except UnsupportedDecoder as why_not:
        why = f"{name} has no tokenizer.json, and its decoding is not supported: {why_not}"
        return TokenizerReady("", "", error=why)
    return TokenizerReady("", str(path))


if __name__ == "__main__":
    # a regular exit takes most of a second to tear down the tokenizer library's imports
    os._exit(main())
