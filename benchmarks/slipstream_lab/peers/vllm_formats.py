"""What vLLM's parsers of tool calls cost, and what they read.

usage: VENV/bin/python slipstream_lab/peers/vllm_formats.py --answers FILE --json FILE
       (`slipstream bench formats --vllm-python VENV/bin/python` calls it; the environment is that
       of `vllm_output_path.py`)

Each delta goes through `parse_delta` of the parser that vLLM's server composes for
--tool-call-parser NAME without a reasoning parser, with the ids that it is made of. The tokenizer
is a stand-in that knows the format's delimiters, as no model is at hand; parsers that need more of
a tokenizer are left out, among them GPT-OSS's, which reads ids alone. A parser that raises has read
nothing: the server answers that with an error.
"""
# ruff: noqa: E402  vLLM's log is silenced before vLLM is imported

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
logging.disable(logging.ERROR)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

import vllm
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

_FIRST_ID = 100_000
_MAX_COST_S = 20.0  # of one measurement; the shorter texts tell the rest


class StandInTokenizer:
    """Knows the delimiters of a format; every piece of text is a token of its own."""

    def __init__(self, added_tokens: Sequence[str]) -> None:
        self._vocab = {text: _FIRST_ID + i for i, text in enumerate(added_tokens)}
        self._texts = {token_id: text for text, token_id in self._vocab.items()}
        # none is dropped with the special tokens, whatever a parser makes of its request
        self.all_special_tokens: list[str] = []
        self.all_special_ids: list[int] = []
        self.eos_token_id = self.bos_token_id = self.pad_token_id = None

    def get_vocab(self) -> dict[str, int]:
        return self._vocab

    @property
    def vocab(self) -> dict[str, int]:
        return self._vocab

    def id_of(self, text: str, *, is_token: bool) -> int:
        if is_token:
            return self._vocab[text]
        token_id = len(self._texts)
        self._texts[token_id] = text
        return token_id

    def encode(self, text: str, **_options: object) -> list[int]:
        return [self._vocab[text]] if text in self._vocab else [self.id_of(text, is_token=False)]

    def decode(self, ids: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        given = [ids] if isinstance(ids, int) else ids
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return "".join(self._texts.get(it, "") for it in given if it not in skipped)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        if isinstance(tokens, str):
            return self._vocab.get(tokens)
        return [self._vocab.get(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self._texts.get(it, "") for it in ids]


def main() -> None:
    """Measure what --answers holds and write --json."""
    options = argparse.ArgumentParser()
    options.add_argument("--answers", type=Path, required=True)
    options.add_argument("--json", type=Path, required=True)
    arguments = options.parse_args()
    given = json.loads(arguments.answers.read_bytes())
    costs = [cost(answer, given["runs"]) for answer in given["long_answers"]]
    results = [
        [read(answer, pieces) for pieces in answer["divisions"]] for answer in given["answers"]
    ]
    found = {"version": vllm.__version__, "us_per_delta": costs, "results": results}
    arguments.json.write_text(json.dumps(found))


def cost(answer: dict[str, Any], runs: int) -> float | None:
    """Microseconds of CPU time of a delta, the median over the runs; None if it cannot be had."""
    times = []
    for _ in range(runs):
        try:
            parser, tokenizer = new_parser(answer)
            request = new_request(LONG_TOOLS)
            for text, is_token in answer["before"]:
                feed(parser, tokenizer, request, text, is_token=is_token)
            ids = [[tokenizer.id_of(text, is_token=False)] for text, _ in answer["deltas"]]
            begin = time.thread_time_ns()
            for (text, _), own in zip(answer["deltas"], ids, strict=True):
                parser.parse_delta(text, own, request, [], finished=False)
            times.append((time.thread_time_ns() - begin) / 1e3 / len(ids))
        except Exception as error:
            print(f"{answer['variant']}: {error!r}")
            return None
        if times[-1] * len(ids) > _MAX_COST_S * 1e6:
            break
    return statistics.median(times)


LONG_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
            },
        },
    }
]


def read(answer: dict[str, Any], pieces: list[list[Any]]) -> list[Any] | None:
    """Reasoning, content and calls of a divided answer; None if the parser cannot be had."""
    try:
        parser, tokenizer = new_parser(answer)
    except Exception as error:
        print(f"{answer['variant']}: {error!r}")
        return None
    request = new_request(answer["case"][1])
    reasoning, content = "", ""
    calls: dict[int, list[Any]] = {}
    try:
        for i, (text, is_token) in enumerate(pieces):
            is_last = i == len(pieces) - 1
            delta = feed(parser, tokenizer, request, text, is_token=is_token, is_last=is_last)
            if delta is None:
                continue
            reasoning += delta.reasoning or ""
            content += delta.content or ""
            for call in delta.tool_calls or ():
                own = calls.setdefault(call.index, ["", "", True])
                own[0] += (call.function.name if call.function else None) or ""
                own[1] += (call.function.arguments if call.function else None) or ""
    except Exception as error:
        return ["", f"{type(error).__name__}: {error}", []]
    return [reasoning, content, [calls[index] for index in sorted(calls)]]


def new_parser(answer: dict[str, Any]) -> tuple[Any, StandInTokenizer]:
    """The parser of an answer's format, and its tokenizer."""
    tokenizer = StandInTokenizer(answer["added_tokens"])
    parser_class = ParserManager.get_parser(
        tool_parser_name=answer["format"],
        enable_auto_tools=True,
    )
    tools = new_request(answer["case"][1] if "case" in answer else LONG_TOOLS).tools
    return parser_class(tokenizer, tools), tokenizer


def new_request(tools: list[dict[str, Any]]) -> ChatCompletionRequest:
    """A request with these tools, of which the model may call any."""
    return ChatCompletionRequest(
        model="none", messages=[{"role": "user", "content": "?"}], tools=tools, tool_choice="auto"
    )


def feed(
    parser: Any,
    tokenizer: StandInTokenizer,
    request: ChatCompletionRequest,
    text: str,
    *,
    is_token: bool,
    is_last: bool = False,
) -> Any:
    """One delta of one token."""
    ids = [tokenizer.id_of(text, is_token=is_token)]
    return parser.parse_delta(text, ids, request, [], finished=is_last)


if __name__ == "__main__":
    main()
