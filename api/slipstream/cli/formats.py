"""`slipstream formats [MODEL]`: how answers are written, and how a model's are."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.cli.options.parser import Parser, one_line
from slipstream.errors import wrong_option
from slipstream.stack.plan.models.gguf_folder import with_gguf_folder
from slipstream.stack.plan.models.model_source import check_hub, model_and_tokenizer
from slipstream.stack.settings import settings_from
from slipstream_ipc.formats.answer_format import delimiters
from slipstream_ipc.formats.choose import FormatChoice, choose_format
from slipstream_ipc.formats.table import CALLS, NONE, REASONING, WHOLE

_MAX_DELIMITERS = 4  # shown of one format


def add_formats(parser: Parser) -> None:
    """Add the command's options."""
    parser.introduce(
        "[MODEL] [options]", ("slipstream formats", "slipstream formats Qwen/Qwen3-8B")
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="say which formats this model's answers have, in place of a list of all; as in serve",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="folder or hub id of the tokenizer (default: the model's own)",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code from the model's folder, with all of your permissions",
    )
    parser.set_defaults(run=formats)


def formats(arguments: argparse.Namespace) -> int:
    """List the formats, or describe a model's. Raises: BadRequestError."""
    if arguments.model is None and arguments.tokenizer is None:
        lines = _table()
    else:
        lines = _described(_choice(arguments))
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _choice(arguments: argparse.Namespace) -> FormatChoice:
    """Choose the format as a server's tokenizer process does. Raises: BadRequestError."""
    model, source = model_and_tokenizer(arguments.model, arguments.tokenizer)
    settings = settings_from({"model": arguments.model, "tokenizer": arguments.tokenizer})
    _, source = with_gguf_folder(settings, model, source, {})
    option = "model" if arguments.tokenizer is None else "tokenizer"
    if not source.startswith("/"):
        check_hub(option, source)
    from transformers import AutoTokenizer  # takes a moment

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, trust_remote_code=arguments.trust_remote_code
        )
    except Exception as error:  # the libraries raise a bare KeyError, too
        allowed = f"a model whose tokenizer can be loaded ({one_line(error)})"
        raise wrong_option(option, source, allowed) from error
    return choose_format(
        tokenizer.chat_template,
        tokenizer.get_added_vocab(),
        response_template=getattr(tokenizer, "response_template", None),
    )


def _described(choice: FormatChoice) -> Iterator[str]:
    found = choice.format
    if found is None:
        parts: tuple[Any, Any] = (None, None)
    else:
        parts = (found, found) if found.name in WHOLE else (found.reasoning, found.calls)
    for title, part, why in zip(
        ("reasoning", "tool calls"), parts, (choice.reasoning, choice.calls), strict=True
    ):
        yield f"{title + ':':<12}{NONE if part is None else part.name} ({why})"


def _table() -> Iterator[str]:
    sections: tuple[tuple[str, Mapping[str, Any]], ...] = (
        ("reasoning (--reasoning-format)", REASONING),
        ("tool calls (--tool-format)", CALLS),
        ("both (either option)", WHOLE),
    )
    width = max(len(name) for _, entries in sections for name in entries) + 2
    for title, entries in sections:
        if entries:
            yield f"{title}:"
        for name, entry in entries.items():
            literals = list(dict.fromkeys(each.literal for each in delimiters(entry)))
            shown = " ".join(map(_one_line, literals[:_MAX_DELIMITERS]))
            more = " …" if len(literals) > _MAX_DELIMITERS else ""
            yield f"  {name:<{width}}{shown}{more}".rstrip()
    yield f"Either option may be {NONE}. `slipstream formats MODEL` says which ones a model has."


def _one_line(literal: str) -> str:
    return literal.replace("\n", "\\n")
