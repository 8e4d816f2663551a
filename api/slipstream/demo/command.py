"""`slipstream demo`: what there is to be seen."""

from __future__ import annotations

from slipstream.demo.kill import add_kill
from slipstream.options import Parser


def add_demo(parser: Parser) -> None:
    """The demonstrations."""
    demos = parser.add_subparsers(dest="demo", required=True, metavar="DEMO")
    about = "streams that go on while the worker and the core are killed"
    add_kill(demos.add_parser("kill", help=about, description=f"{about.capitalize()}."))
