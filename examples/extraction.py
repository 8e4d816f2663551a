"""Text to typed objects: a schema is made of a class, and every answer keeps to it.

    python examples/extraction.py < sentences.txt

Each line of standard input is a sentence, each line of standard output what it tells, as an object.
The grammar makes the form right; the content is as good as the model.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Literal

import msgspec

import slipstream

Word = Annotated[str, msgspec.Meta(min_length=1, max_length=24)]


class Fact(msgspec.Struct, forbid_unknown_fields=True):
    """What is looked for in a sentence."""

    subject: Word
    kind: Literal["statement", "expression", "type", "other"]
    mentions: Annotated[list[Word], msgspec.Meta(max_length=3)]


async def extract(client: slipstream.AsyncClient, sentence: str) -> Fact:
    turns = [
        {"role": "system", "content": "Answer with a JSON object: subject, kind, mentions."},
        {"role": "user", "content": sentence},
    ]
    answer = await client.generate(
        turns,
        structured_outputs=slipstream.StructuredOutputs(json=msgspec.json.schema(Fact)),
        max_tokens=300,
        temperature=0,
    )
    if answer.finish_reason != "stop":
        raise ValueError(f"no whole object within max_tokens: {answer.text!r}")
    return msgspec.json.decode(answer.text, type=Fact)


async def main() -> int:
    sentences = [line.strip() for line in sys.stdin if line.strip()]
    async with slipstream.AsyncClient() as client:
        asked = (extract(client, each) for each in sentences)
        found = await asyncio.gather(*asked, return_exceptions=True)
    failed = 0
    for sentence, fact in zip(sentences, found, strict=True):
        if isinstance(fact, BaseException):
            failed += 1
            print(f"{sentence!r}: {fact}", file=sys.stderr)
        else:
            print(msgspec.json.encode(fact).decode())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
