"""A Lark grammar as one regular expression, where its rules do not hold themselves.

The input of a custom tool is a string of JSON to the model, and a grammar library that takes the
longest terminal cannot tell where one ends within escapes. A pattern is one terminal, which the
library writes as JSON itself. What is matched is what the grammar says of text: no terminal takes
what another one could.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import NamedTuple

MAX_REGEX_CHARS = 2**14  # of an expression, and of a definition
_MAX_DEPTH = 100  # of groups and rules within each other

_TOKENS = re.compile(
    r"""
    (?P<blank> [ \t\f\r]+ | (?://|\#)[^\n]* )
    | (?P<newline> \n )
    | (?P<text> "(?:\\.|[^"\\\n])*"i? )
    | (?P<regex> /(?!/)(?:\\.|[^/\\\n])*/[a-z]* )
    | (?P<name> [?!]*_?(?:[a-z][a-z0-9_]*|[A-Z][A-Z0-9_]*) )
    | (?P<import> %import\b ) | (?P<ignore> %ignore\b )
    | (?P<number> [0-9]+ )
    | (?P<sign> -> | \.\. | [:|()\[\]?*+~.,] )
    """,
    re.VERBOSE,
)
_META = re.compile(r"[\\.^$|?*+(){}\[\]]")
_HALF = re.compile("[\ud800-\udfff]")
_COMMON = {  # of `%import common.…`, as lark's own file of them has these
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}


class NotRegularError(Exception):
    """The grammar has rules that hold themselves, or what this module does not know."""


class _Token(NamedTuple):
    kind: str  # a group of `_TOKENS`
    text: str


def regex_of_lark(definition: str) -> str:
    """The regular expression of the texts that the grammar's `start` allows. Raises:
    NotRegularError.
    """
    return _Grammar(_tokens(_bounded(definition))).start()


def _tokens(definition: str) -> list[_Token]:
    found: list[_Token] = []
    at = 0
    while at < len(definition):
        match = _TOKENS.match(definition, at)
        if match is None:
            raise NotRegularError(f"{definition[at : at + 20]!r} is not known")
        assert match.lastgroup is not None
        if match.lastgroup != "blank":
            found.append(_Token(match.lastgroup, match[0]))
        at = match.end()
    return found


class _Grammar:
    """The definitions of one grammar, of which each is written where it is used."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._bodies: dict[str, list[_Token]] = {}
        self._known: dict[str, str] = {}  # regular expressions of terminals by name
        self._rules: dict[str, str] = {}
        self._open: set[str] = set()  # names of what is being written
        self._ignored: list[list[_Token]] = []
        self._skip = ""  # what may stand between terminals
        self.depth = 0
        for statement in _statements(tokens):
            self._define(statement)

    def start(self) -> str:
        """The expression of `start`, with what is ignored at the end."""
        skips = [_Expression(self, body, is_terminal=True).whole() for body in self._ignored]
        found = f"(?:{'|'.join(skips)})*" if skips else ""
        self._skip = found
        return _bounded(self.use("start", is_terminal=False) + found)

    def use(self, name: str, *, is_terminal: bool) -> str:
        """The expression of a rule or a terminal. is_terminal: within another terminal."""
        is_rule = name.lstrip("_")[:1].islower()
        if is_rule and is_terminal:
            raise NotRegularError(f"the rule {name} within a terminal")
        known = self._rules if is_rule else self._known
        if name not in known:
            body = self._bodies.get(name)
            if body is None:
                raise NotRegularError(f"{name} is not defined")
            if name in self._open:
                raise NotRegularError(f"{name} holds itself")
            self._open.add(name)
            known[name] = _bounded(_Expression(self, body, is_terminal=not is_rule).whole())
            self._open.remove(name)
        text = known[name]
        return text if is_rule or is_terminal else self.between(text)

    def between(self, terminal: str) -> str:
        """A terminal of a rule, and what is ignored before it."""
        return self._skip + terminal

    def _define(self, statement: list[_Token]) -> None:
        match statement:
            case [("import", _), ("name", "common"), ("sign", "."), ("name", name)]:
                self._import(name, name)
            case [
                ("import", _),
                ("name", "common"),
                ("sign", "."),
                ("name", name),
                ("sign", "->"),
                ("name", new),
            ]:
                self._import(name, new)
            case [("import", _), ("name", "common"), ("sign", "("), *names, ("sign", ")")]:
                for token in names:
                    if token.kind == "name":
                        self._import(token.text, token.text)
            case [("ignore", _), *body]:
                self._ignored.append(body)
            case [("name", name), ("sign", "."), ("number", _), ("sign", ":"), *body]:
                self._add(name, body)
            case [("name", name), ("sign", ":"), *body]:
                self._add(name, body)
            case _:
                raise NotRegularError("a statement that is neither a rule nor a terminal")

    def _import(self, name: str, new: str) -> None:
        if name not in _COMMON:
            raise NotRegularError(f"common.{name} is not known")
        self._known[new] = _COMMON[name]

    def _add(self, name: str, body: list[_Token]) -> None:
        name = name.lstrip("?!")
        if name in self._bodies:
            raise NotRegularError(f"{name} is defined twice")
        self._bodies[name] = body


def _statements(tokens: list[_Token]) -> list[list[_Token]]:
    """The statements: one begins on a line of its own with a name and a colon, or a command."""
    found: list[list[_Token]] = []
    for at, token in enumerate(tokens):
        if token.kind == "newline":
            continue
        is_first = at == 0 or tokens[at - 1].kind == "newline"
        behind = [each.text for each in tokens[at + 1 : at + 4]]
        is_named = token.kind == "name" and (
            behind[:1] == [":"] or (behind[:1] == ["."] and behind[2:] == [":"])
        )
        if is_first and (is_named or token.kind in ("import", "ignore")):
            found.append([])
        if not found:
            raise NotRegularError("text before the first rule")
        found[-1].append(token)
    return found


class _Expression:
    """The parser of one definition's body."""

    def __init__(self, grammar: _Grammar, tokens: list[_Token], *, is_terminal: bool) -> None:
        self._grammar = grammar
        self._tokens = tokens
        self._is_terminal = is_terminal
        self._at = 0

    def whole(self) -> str:
        """The expression of all tokens, as a group."""
        found = self._branches()
        if self._at < len(self._tokens):
            raise NotRegularError(f"{self._tokens[self._at].text!r} is out of place")
        return found

    def _next(self) -> _Token:
        if self._at < len(self._tokens):
            return self._tokens[self._at]
        return _Token("", "")

    def _take(self, sign: str) -> bool:
        is_next = self._next() == ("sign", sign)
        self._at += is_next
        return is_next

    def _branches(self) -> str:
        self._grammar.depth += 1
        if self._grammar.depth > _MAX_DEPTH:
            raise NotRegularError("groups and rules within each other are too deep")
        found = self._sequence()
        while self._take("|"):
            found = _bounded(f"{found}|{self._sequence()}")
        self._grammar.depth -= 1
        return f"(?:{found})"

    def _sequence(self) -> str:
        found = ""
        while self._next().kind in ("name", "text", "regex") or self._next().text in ("(", "["):
            found = _bounded(found + self._repeated())
        if self._take("->"):  # the name of a branch
            self._at += 1
        return found

    def _repeated(self) -> str:
        one = self._one()
        for sign in "?*+":
            if self._take(sign):
                return f"(?:{one}){sign}"
        if self._take("~"):
            least = most = self._number()
            if self._take(".."):
                most = self._number()
            return f"(?:{one}){{{least},{most}}}"
        return one

    def _number(self) -> int:
        token = self._next()
        self._at += 1
        if token.kind != "number" or len(token.text) > 4:
            raise NotRegularError(f"{token.text!r} is no number of times")
        return int(token.text)

    def _one(self) -> str:
        token = self._next()
        self._at += 1
        match token:
            case ("sign", "("):
                return self._closed(")")
            case ("sign", "["):
                return f"{self._closed(']')}?"
            case ("name", name):
                return self._grammar.use(name, is_terminal=self._is_terminal)
            case ("regex", written):
                found = _of_regex(written)
            case ("text", written) if self._take(".."):
                last = self._next()
                self._at += 1
                found = _range(written, last.text)
            case (_, written):
                found = _of_text(written)
        return found if self._is_terminal else self._grammar.between(found)

    def _closed(self, sign: str) -> str:
        found = self._branches()
        if not self._take(sign):
            raise NotRegularError(f"no {sign!r}")
        return found


def _text_of(written: str) -> str:
    try:
        found = ast.literal_eval(written.removesuffix("i"))
    except (ValueError, SyntaxError):
        found = None
    if not isinstance(found, str) or _HALF.search(found):
        raise NotRegularError(f"{written[:20]} is no text")
    return found


def _of_text(written: str) -> str:
    is_any_case = written.endswith("i")
    return "".join(_of_char(each, is_any_case=is_any_case) for each in _text_of(written))


_WRITTEN: Mapping[str, str] = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def _of_char(char: str, *, is_any_case: bool = False) -> str:
    if is_any_case and char.isalpha():
        cases = dict.fromkeys((char.lower(), char.upper()))
        return f"[{''.join(cases)}]" if all(len(each) == 1 for each in cases) else char
    return _META.sub(r"\\\g<0>", char) if char not in _WRITTEN else _WRITTEN[char]


def _range(first: str, last: str) -> str:
    begin, end = _text_of(first), _text_of(last)
    if len(begin) != 1 or len(end) != 1 or not (begin + end).isalnum():
        raise NotRegularError(f"{first}..{last} is no range")
    return f"[{begin}-{end}]"


def _of_regex(written: str) -> str:
    body, _, flags = written[1:].rpartition("/")
    if set(flags) - {"i", "s"}:
        raise NotRegularError(f"{written[:20]!r} has flags that are not known")
    body = re.sub(r"\\(.)", lambda found: "/" if found[1] == "/" else found[0], body)
    return f"(?{flags}:{body})"


def _bounded(regex: str) -> str:
    if len(regex) > MAX_REGEX_CHARS:
        raise NotRegularError(f"more than {MAX_REGEX_CHARS} characters")
    return regex
