"""`slipstream generate`: continues a text, as the model does without a chat template.

Only the continuation goes to standard output.
"""

from __future__ import annotations

import argparse
import sys

import msgspec

from slipstream.cli.options.parser import Parser
from slipstream.cli.options.sampling_options import add_sampling, sampling_params_of
from slipstream.cli.options.stack_options import take_model
from slipstream.cli.server_choice import add_client_options, connected, model_of_command
from slipstream.errors import missing_option, wrong_option
from slipstream.outputs import Delta, PromptTokenLogprobs

_MAX_TOKENS = 256


def add_generate(parser: Parser) -> None:
    """Add the command's options."""
    parser.introduce(
        "TEXT [options]",
        (
            'slipstream generate "The with statement is used to" --temperature 0',
            "slipstream generate - --json < prompt.txt",
        ),
    )
    parser.add_argument(
        "text",
        nargs="?",
        metavar="TEXT",
        help="the text to continue; - reads it from standard input. For a question use "
        "`slipstream chat QUESTION`",
    )
    parser.add_argument(
        "--prompt",
        dest="prompt_option",
        metavar="TEXT",
        help="the text as an option; the argument is then MODEL",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="write each delta as a line of JSON: text, token_ids, logprobs, finish_reason, "
        "stop_reason",
    )
    parser.add_argument(
        "--logprobs",
        metavar="K",
        default=argparse.SUPPRESS,
        help="with --json: log-probabilities of each token and of the K most likely ones",
    )
    parser.add_argument(
        "--prompt-logprobs",
        metavar="K",
        default=argparse.SUPPRESS,
        help="with --json: the same for the prompt's tokens, as a first line",
    )
    parser.add_argument(
        "--cache-salt",
        metavar="TEXT",
        help="share cached prompts only with requests that have the same salt",
    )
    add_sampling(parser, max_tokens=_MAX_TOKENS)
    add_client_options(parser, has_model_argument=False)
    parser.set_defaults(run=generate)


def generate(arguments: argparse.Namespace) -> int:
    """Stream one answer to standard output."""
    prompt = _prompt_of(arguments)
    params = sampling_params_of(arguments)
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and not arguments.json:
            raise wrong_option(name, wanted, "nothing, unless with --json")
    write = sys.stdout.write
    with connected(arguments) as client:
        last, is_empty, reason = "\n", True, None
        try:
            model = model_of_command(arguments, client)
            stream = client.stream(prompt, params, model=model, cache_salt=arguments.cache_salt)
            for index, delta in enumerate(stream):
                if not index and (of_prompt := stream.prompt_logprobs) is not None:
                    write(_prompt_line(of_prompt))
                write(_json_line(delta) if arguments.json else delta.text)
                sys.stdout.flush()
                last = delta.text[-1:] or last
                is_empty, reason = is_empty and not delta.text, delta.stop_reason
        finally:
            if last != "\n" and sys.stdout.isatty() and not arguments.json:
                # so that an error or the shell prompt starts a line; a file gets the exact text
                write("\n")
                sys.stdout.flush()
    if is_empty and not arguments.json:
        sys.stderr.write(f"slipstream generate: {_why_empty(reason)}\n")
    return 0


def _prompt_of(arguments: argparse.Namespace) -> str:
    """The prompt; moves MODEL to its place. Raises: BadRequestError."""
    given: str | None = arguments.text
    if arguments.prompt_option is not None:
        if given is not None:
            take_model(arguments, given)
        given = arguments.prompt_option
    if given is None:
        raise missing_option("TEXT", "give a text to continue, or - for standard input")
    if given == "-":
        given = sys.stdin.read()
    if not given:
        raise missing_option("TEXT", "the one given is empty")
    return given


def _why_empty(reason: int | str | None) -> str:
    if isinstance(reason, str):
        return f"the answer is empty: it begins with {reason!r}, where --stop ends it"
    return (
        "the answer is empty: the model ended it at once. `generate` continues a text; for a "
        "question use `slipstream chat QUESTION`"
    )


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
