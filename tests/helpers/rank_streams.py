"""Streams that run together while something happens to a rank of their core."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tests.helpers.patience import PATIENCE_S

from slipstream import Client, Stack
from slipstream.stack.supervisor_events import ProcessEnded

PROMPTS = [f"Chapter {n}: how names are bound, and where." for n in range(6)]


def texts(client: Client, seen: Callable[[int], None]) -> list[str]:
    """The texts of the streams. seen: told the characters of the first one so far."""
    found = [""] * len(PROMPTS)

    def read(at: int) -> None:
        stream = client.stream(
            PROMPTS[at],
            max_tokens=100,
            seed=at,
            temperature=0.8,
            top_p=0.95 if at % 2 else 1.0,
            ignore_eos=True,
        )
        for delta in stream:
            found[at] += delta.text
            if at == 0:
                seen(len(found[at]))

    threads = [threading.Thread(target=read, args=(at,)) for at in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * PATIENCE_S)
        assert not thread.is_alive()
    return found


def once_under_way(act: Callable[[], None]) -> Callable[[int], None]:
    """`seen` for `texts`: calls `act` once, in the middle of the first stream."""
    has_acted: list[bool] = []

    def seen(num_chars: int) -> None:
        if num_chars > 100 and not has_acted:
            has_acted.append(True)
            act()

    return seen


def core_ends(stack: Stack) -> Sequence[str]:
    """How cores have ended since the last call."""
    return [
        each.how
        for each in stack.events()
        if isinstance(each, ProcessEnded) and each.name == "core"
    ]
