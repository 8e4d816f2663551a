"""`slipstream generate`: streams the answer to one prompt, and nothing else, to standard output."""

from __future__ import annotations

import argparse
import sys

import msgspec

from slipstream.cli.options import (
    add_connection,
    add_sampling,
    add_settings,
    connected,
    sampling_params_of,
)
from slipstream.cli.parser import Parser
from slipstream.errors import wrong_option
from slipstream.outputs import Delta, PromptTokenLogprobs

_MAX_TOKENS = 256


def add_generate(parser: Parser) -> None:
    """Add the command's options."""
    add_settings(parser)
    parser.add_argument(
        "--prompt", required=True, metavar="TEXT", help="what to go on with; - reads standard input"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="a line of JSON for each delta: text, token_ids, logprobs, finish_reason, stop_reason",
    )
    add_sampling(parser, max_tokens=_MAX_TOKENS)
    parser.add_argument(
        "--logprobs",
        metavar="K",
        default=argparse.SUPPRESS,
        help="with --json: log-probabilities of the tokens and of the K likeliest",
    )
    parser.add_argument(
        "--prompt-logprobs",
        metavar="K",
        default=argparse.SUPPRESS,
        help="with --json: a line before all others, with those of the prompt's tokens",
    )
    parser.add_argument(
        "--cache-salt",
        metavar="TEXT",
        help="share what is computed of equal beginnings only with who gives the same",
    )
    add_connection(parser)
    parser.set_defaults(run=generate)


def generate(arguments: argparse.Namespace) -> int:
    """Stream one answer to standard output."""
    params = sampling_params_of(arguments)
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and not arguments.json:
            raise wrong_option(name, wanted, "nothing, unless with --json")
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    write = sys.stdout.write
    with connected(arguments) as client:
        last = "\n"
        try:
            stream = client.stream(prompt, params, cache_salt=arguments.cache_salt)
            for index, delta in enumerate(stream):
                if not index and (of_prompt := stream.prompt_logprobs) is not None:
                    write(_prompt_line(of_prompt))
                write(_json_line(delta) if arguments.json else delta.text)
                sys.stdout.flush()
                last = delta.text[-1:] or last
        finally:
            if last != "\n" and sys.stdout.isatty() and not arguments.json:
                # so that an error or the shell prompt starts a line; a file gets the exact text
                write("\n")
                sys.stdout.flush()
    return 0


def _prompt_line(of_prompt: PromptTokenLogprobs) -> str:
    shown = [None if token is None else list(token.values()) for token in of_prompt]
    return msgspec.json.encode({"prompt_logprobs": shown}).decode() + "\n"


def _json_line(delta: Delta) -> str:
    logprobs = delta.logprobs
    fields = {
        "text": delta.text,
        "token_ids": delta.token_ids,
        "logprobs": None if logprobs is None else [list(token.values()) for token in logprobs],
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }
    return msgspec.json.encode(fields).decode() + "\n"
