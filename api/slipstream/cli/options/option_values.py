"""Values of options on a command line: switches, and lists of several values."""

from __future__ import annotations

import argparse
from typing import Any

_SWITCHES = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


class Several(argparse.Action):
    """Collects the values of an option that may be given several times.

    Values on the command line replace those from elsewhere, instead of adding to them.
    """

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        value: Any,
        _option: str | None = None,
    ) -> None:
        """Add one value."""
        marker = f"{self.dest}_so_far"
        values = [*getattr(namespace, marker, ()), value]
        setattr(namespace, marker, values)
        setattr(namespace, self.dest, values)


def switch(text: str) -> bool | str:
    """The value of an option that is true or false; other text as it is, to be refused later."""
    return _SWITCHES.get(text.lower(), text)
