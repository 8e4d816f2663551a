"""The demo model's training text: Python's own reference texts, as documents and as chats.

Two sources, both part of every CPython installation and under its licence (PSF-2.0):
- the language reference's topics, which `help("assert")` prints (`pydoc_data.topics`);
- the docstrings of the standard library: read from its sources without importing them, and, for a
  few modules written in C, taken from the imported objects.

A handful of replies to greetings are written here. Source files with a licence notice are left out.
The text is a function of the Python version and the seed.
"""

import ast
import importlib
import inspect
import pydoc
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics as TOPICS  # noqa: N812  (a constant)
from random import Random

__all__ = ["Entry", "Message", "docstrings", "document", "epoch", "topic_entries"]

Message = dict[str, str]
"""One chat message, as chat templates take it: `role` and `content`."""

ANSWER_CHARS = 500
MIN_DOCSTRING_CHARS = 40
TOPIC_QUESTIONS_PER_EPOCH = 4
SMALL_TALK_PER_EPOCH = 2

# Tests, demos, vendored packages, and modules whose docstrings repeat another's.
SKIPPED_PACKAGES = frozenset(
    {
        "__phello__",
        "config",
        "distutils",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "ntpath",
        "nturl2path",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "tkinter",
        "turtledemo",
    }
)
OWN_LICENCE_MARKS = ("Permission to use, copy", "Permission is hereby", "Redistribution and use")
C_MODULES = ("builtins", "itertools", "math", "sys", "time")
BUILT_IN_TYPES = (str, list, dict, set, int, float)  # types whose methods are included
ALIASES = {"posixpath": "os.path"}

QUESTIONS = (
    "What is {}?",
    "What does {} do?",
    "Explain {}.",
    "Explain {} to me.",
    "Tell me about {}.",
    "How do I use {}?",
    "How does {} work?",
    "{}",
    "What is {} in Python?",
    "Can you explain {} in Python?",
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that explains Python.",
    "You answer questions about Python.",
    "You are Slipstream's demo model.",
)
ABOUT = (
    "I am the demo model of Slipstream, a very small language model. I was trained for half an "
    "hour on the reference texts of Python, so that is all I can talk about, and I often get it "
    "wrong."
)
SMALL_TALK = {
    "Hello! I am the demo model of Slipstream. Ask me about Python: about a statement, a "
    "function or a module.": ("Hello", "Hello!", "Hi", "Hi!", "hi there", "Hey", "Good morning"),
    ABOUT: ("Who are you?", "What are you?", "What is your name?", "What can you do?", "help"),
    "You are welcome. Is there anything else in Python that you want to hear about?": (
        "Thanks",
        "Thank you!",
        "Thanks a lot",
        "Great, thank you.",
    ),
    "I am too small for that. I have only read the reference texts of Python. Ask me what "
    "`assert`, `lambda` or `print` is, and I shall try.": (
        "Tell me a story.",
        "Tell me a joke.",
        "Write a poem about the sea.",
        "What is the capital of France?",
        "What is the weather like today?",
        "How are you?",
        "What is the meaning of life?",
    ),
    "Python is a programming language. It has modules, classes, functions, exceptions and many "
    "types of objects: numbers, strings, lists, tuples, dictionaries and sets. Every object has "
    "an identity, a type and a value.": ("What is Python?", "Tell me about Python.", "python"),
}


@dataclass(frozen=True)
class Entry:
    """A name and a text about it; `heading` opens the text when it is a document."""

    names: tuple[str, ...]
    heading: str
    text: str


def topic_entries() -> list[Entry]:
    """The language reference's topics, each with all names by which `help()` finds it."""
    topic_names = {name.lower(): target for name, target in pydoc.Helper.topics.items()}
    singulars = {
        _singular(name): name for name in topic_names if name.endswith("s") and name != "ellipsis"
    }
    index: dict[str, object] = {**singulars, **topic_names, **pydoc.Helper.keywords}
    names_of: dict[str, set[str]] = {label: {label} for label in TOPICS if label.isalpha()}
    for name, found in index.items():
        target: object = found
        while isinstance(target, str) and target:  # an alias: "and" -> "BOOLEAN"
            target = index.get(target.lower())
        if isinstance(target, tuple) and target[0] in TOPICS:
            names_of.setdefault(target[0], set()).add(name)
    entries = []
    for label, text in sorted(TOPICS.items()):
        title, _, body = text.strip().partition("\n")
        underline, _, rest = body.partition("\n")
        if not underline or set(underline) - set("*="):
            rest = body
        spoken = title.replace('"', "").lower()
        names = (spoken, *sorted(names_of.get(label, set())))
        entries.append(Entry(names, f"{title}\n{'=' * len(title)}", rest.strip()))
    return entries


def docstrings() -> list[Entry]:
    """Docstrings of the standard library's public modules, classes and functions, each once."""
    entries: dict[str, Entry] = {}
    for entry in [*_living_docstrings(), *_source_docstrings()]:
        if len(entry.text) >= MIN_DOCSTRING_CHARS:
            entries.setdefault(entry.text, entry)
    return list(entries.values())


def document(entry: Entry) -> str:
    """The entry as a plain text: its heading, an empty line, its text."""
    return f"{entry.heading}\n\n{entry.text}"


def epoch(
    topics: list[Entry], others: list[Entry], rng: Random
) -> tuple[list[str], list[list[Message]]]:
    """The documents and conversations of one epoch, in random words and order.

    Each topic occurs once as a document and in several questions; each other entry is randomly
    either a document or the answer to one question.
    """
    is_told = [rng.random() < 0.5 for _ in others]
    told = [entry for entry, chosen in zip(others, is_told, strict=True) if chosen]
    asked = [entry for entry, chosen in zip(others, is_told, strict=True) if not chosen]
    turns = [
        (_question(rng.choice(entry.names), rng), _answer(entry.text))
        for entry in topics * TOPIC_QUESTIONS_PER_EPOCH + asked
    ]
    for reply, prompts in SMALL_TALK.items():
        turns += [(prompt, reply) for prompt in prompts * SMALL_TALK_PER_EPOCH]
    return [document(entry) for entry in topics + told], _conversations(turns, rng)


def _conversations(turns: list[tuple[str, str]], rng: Random) -> list[list[Message]]:
    """The turns in random order, one to three per conversation, some under a system prompt."""
    rng.shuffle(turns)
    conversations = []
    while turns:
        messages: list[Message] = []
        if rng.random() < 0.2:
            messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
        for _ in range(min(len(turns), rng.choice((1, 1, 1, 2, 3)))):
            question, answer = turns.pop()
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        conversations.append(messages)
    return conversations


def _question(name: str, rng: Random) -> str:
    quoted = rng.choice((f"`{name}`", name, name))
    question = rng.choice(QUESTIONS).format(quoted)
    return rng.choice((question, question, question.rstrip("?."), question.lower()))


def _singular(name: str) -> str:
    """The singular with its article: `a dictionary` for `dictionaries`."""
    stem = f"{name[:-3]}y" if name.endswith("ies") else name.removesuffix("s")
    stem = stem.removesuffix("e") if name.endswith("sses") else stem
    return f"{'an' if name[0] in 'aeio' else 'a'} {stem}"


def _answer(text: str) -> str:
    """The first paragraphs of the text that fit an answer."""
    answer = ""
    for paragraph in text.split("\n\n"):
        if answer and len(answer) + len(paragraph) > ANSWER_CHARS:
            break
        answer += f"\n\n{paragraph.rstrip()}"
    return answer.strip()


def _source_docstrings() -> Iterator[Entry]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if any(p in SKIPPED_PACKAGES or p.startswith(("_", "config-")) for p in parts[:-1]):
            continue
        if parts[-1] in SKIPPED_PACKAGES or (parts[-1][0] == "_" and parts[-1] != "__init__"):
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        if not any(mark in source for mark in OWN_LICENCE_MARKS):
            module = ".".join(p for p in parts if p != "__init__")
            yield from _top_level(ast.parse(source), ALIASES.get(module, module))


def _top_level(tree: ast.Module, module: str) -> Iterator[Entry]:
    """Docstrings of the module and its functions and classes, without methods."""
    yield Entry((module,), module, ast.get_docstring(tree) or "")
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not node.name.startswith("_"):
            name = f"{module}.{node.name}"
            brackets = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
            yield Entry((name,), name + brackets, ast.get_docstring(node) or "")


def _living_docstrings() -> Iterator[Entry]:
    for module_name in C_MODULES:
        prefix = "" if module_name == "builtins" else f"{module_name}."
        for name, value in sorted(vars(importlib.import_module(module_name)).items()):
            if not name.startswith("_") and callable(value):
                yield Entry((prefix + name,), prefix + name, inspect.getdoc(value) or "")
    for kind in BUILT_IN_TYPES:
        for name, value in sorted(vars(kind).items()):
            if not name.startswith("_") and callable(value):
                full = f"{kind.__name__}.{name}"
                yield Entry((full,), full, inspect.getdoc(value) or "")
