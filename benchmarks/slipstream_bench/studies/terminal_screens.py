"""Pictures of a terminal, from a clone to an answer.

    python -m slipstream_bench.studies.terminal_screens CLONE FOLDER

CLONE is a fresh clone of the repository, without `.venv`. Its README's commands run in terminals of
their own, and FOLDER gets the pictures: `terminal-launch.png` once the server is ready,
`terminal-answer.png` and `terminal-kill.png`. Needs pyte (`pip install pyte`).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import signal
import struct
import termios
from pathlib import Path
from typing import Any

_COLUMNS, _LINES = 120, 44
_SIZE = 15  # of the font, in pixels
_PADDING = 16
_PAPER, _INK = (24, 26, 31), (220, 223, 228)
_COLORS = {"green": (152, 195, 121), "red": (224, 108, 117), "brown": (229, 192, 123)}
_COLORS |= {"blue": (97, 175, 239), "cyan": (86, 182, 194), "magenta": (198, 120, 221)}
_QUESTION = '.venv/bin/slipstream chat "What are exceptions?" --temperature 0'
_KILL = ".venv/bin/slipstream demo kill"


class Terminal:
    """A shell command's terminal: what it has written, as a screen of characters."""

    def __init__(self, folder: Path) -> None:
        import pyte

        self._folder = folder
        self.screen: Any = pyte.Screen(_COLUMNS, _LINES)
        self._stream: Any = pyte.ByteStream(self.screen)
        self._pid = self._master = -1

    def start(self, command: str) -> None:
        """Run a command; its line is shown behind a prompt."""
        self._stream.feed(b"$ " + command.encode() + b"\r\n")
        self._pid, self._master = pty.fork()
        if self._pid == 0:
            os.chdir(self._folder)
            os.environ["TERM"] = "xterm-256color"
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("4H", _LINES, _COLUMNS, 0, 0))
            os.execv("/bin/bash", ["bash", "-c", command])  # noqa: S606  (of our own)

    def read_until(self, text: str | None) -> None:
        """Show what is written, until the screen has `text`, or to the command's end.

        Raises: RuntimeError if it ends without the text.
        """
        while text is None or not any(text in line for line in self.screen.display):
            try:
                data = os.read(self._master, 2**16)
            except OSError:  # Linux' end of a pseudo-terminal
                data = b""
            if not data:
                os.waitpid(self._pid, 0)
                if text is not None:
                    raise RuntimeError(f"the command ended without {text!r}")
                return
            self._stream.feed(data)

    def stop(self) -> None:
        """End the command, as Ctrl-C does."""
        os.kill(self._pid, signal.SIGINT)
        self.read_until(None)

    def save(self, path: Path) -> None:
        """Write the screen as a picture, without the empty lines at its end."""
        from matplotlib import get_data_path
        from PIL import Image, ImageDraw, ImageFont

        file = Path(get_data_path(), "fonts", "ttf", "DejaVuSansMono.ttf")
        font = ImageFont.truetype(str(file), _SIZE)
        width, height = font.getlength("m"), round(_SIZE * 1.35)
        num_lines = max(i for i, line in enumerate(self.screen.display, 1) if line.strip())
        size = (round(_COLUMNS * width) + 2 * _PADDING, num_lines * height + 2 * _PADDING)
        image = Image.new("RGB", size, _PAPER)
        draw = ImageDraw.Draw(image)
        for row in range(num_lines):
            for column in range(_COLUMNS):
                char = self.screen.buffer[row][column]
                at = (_PADDING + column * width, _PADDING + row * height)
                draw.text(at, char.data, font=font, fill=_COLORS.get(char.fg, _INK))
        image.save(path, optimize=True)


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("clone", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    server = Terminal(given.clone)
    server.start("scripts/launch")
    server.read_until("slipstream chat")  # one of the last lines that a ready server writes
    server.save(given.folder / "terminal-launch.png")
    for name, command in (("answer", _QUESTION), ("kill", _KILL)):
        client = Terminal(given.clone)
        client.start(command)
        client.read_until(None)
        client.save(given.folder / f"terminal-{name}.png")
    server.stop()


if __name__ == "__main__":
    main()
