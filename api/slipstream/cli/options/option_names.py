"""Names settings in errors as the command line spells them: `--max-num-seqs`, not `max_num_seqs`.

Errors come from code that Python calls too, and name the keyword.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence

_NO_WORDS = ("uds",)
_WORD = r"(?<![\w/'\"$.-])({})(?![\w/'\"-])"


def option_names(
    actions: Sequence[argparse.Action], words: Sequence[str], given: Mapping[str, object]
) -> dict[str, str]:
    """The name that errors use for each value of a parsed command line, by its name in the
    namespace.

    An option is called as it was typed, else by its first name; the value of an argument by the
    argument's placeholder. words: the command line. given: the namespace's values.
    """
    typed = {word.partition("=")[0] for word in words}
    names: dict[str, str] = {}
    for action in actions:
        if not action.option_strings:
            if given.get(action.dest) is not None:
                names[action.dest] = str(action.metavar or action.dest)
            continue
        known = [name for name in action.option_strings if name.startswith("--")]
        said = next((name for name in known if name in typed), None)
        if said is not None:
            names[action.dest] = said
        elif known:
            names.setdefault(action.dest, known[0])
    return names


def with_option_names(message: str, names: Mapping[str, str], field: str | None = None) -> str:
    """The message with the options' names in place of keywords.

    A keyword is replaced where it is `field` at the beginning, and elsewhere where it can be no
    other word.
    """
    begins = (f"{field}: ", f"{field} is missing")
    named = ""
    if field is not None and field in names and message.startswith(begins):
        named, message = names[field], message.removeprefix(field)
    keywords = "|".join(re.escape(name) for name in names if "_" in name or name in _NO_WORDS)
    if not keywords:
        return named + message
    return named + re.sub(_WORD.format(keywords), lambda found: names[found[1]], message)
