"""A conversation in the terminal: each answer is streamed, and the history goes with each question.

    python examples/chat.py

It talks to `slipstream serve` on this machine, or to $SLIPSTREAM_ADDRESS. An empty line or Ctrl-D
ends it. When the conversation outgrows the model, its oldest turns are left out.
"""

from __future__ import annotations

import slipstream

Turn = dict[str, str]
MAX_TOKENS = 200


def fitting(client: slipstream.Client, history: list[Turn]) -> list[Turn]:
    """The newest turns that leave room for an answer; a question and its answer go together."""
    room = client.model.max_model_len - MAX_TOKENS
    while len(history) > 1 and len(client.tokenize(history)) > room:
        history = history[2:]
    return history


def main() -> None:
    history: list[Turn] = []
    with slipstream.Client() as client:
        print(f"talking to {client.model.name}")
        while True:
            try:
                question = input("> ")
            except EOFError:
                break
            if not question:
                break
            history = fitting(client, [*history, {"role": "user", "content": question}])
            stream = client.stream(history, max_tokens=MAX_TOKENS, temperature=0)
            for delta in stream:
                print(delta.text, end="", flush=True)
            print()
            history.append({"role": "assistant", "content": stream.text})


if __name__ == "__main__":
    main()
