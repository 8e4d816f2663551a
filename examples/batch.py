"""A file of prompts to a file of answers, with progress.

    python examples/batch.py prompts.txt answers.jsonl [MODEL]

A line of the first file is a prompt, a line of the second a JSON object. It starts a server of its
own for as long as it runs. `slipstream run-batch` does this for OpenAI's batch format, and goes on
where it was killed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import slipstream


def main() -> None:
    source, target, *model = sys.argv[1:]
    prompts = [line for line in Path(source).read_text().splitlines() if line]
    # answers are wanted whole: large deltas cost less
    params = slipstream.SamplingParams(
        temperature=0, max_tokens=64, stop=["\n\n"], stream_interval=32
    )
    num_done = 0

    def show(_: slipstream.RequestOutput) -> None:
        nonlocal num_done
        num_done += 1
        print(f"\r{num_done} of {len(prompts)}", end="", file=sys.stderr, flush=True)

    with (
        slipstream.Stack(*model, spare_worker=False, spare_core=False) as stack,
        stack.client() as client,
    ):
        answers = client.generate_many(prompts, params, on_done=show)
    print(file=sys.stderr)
    with open(target, "w") as file:
        for prompt, answer in zip(prompts, answers, strict=True):
            row = {"prompt": prompt, "text": answer.text, "finish_reason": answer.finish_reason}
            file.write(json.dumps(row) + "\n")
    num_tokens = sum(answer.num_tokens for answer in answers)
    print(f"{len(answers)} answers, {num_tokens} tokens")


if __name__ == "__main__":
    main()
