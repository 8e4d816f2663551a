"""The demo model's training text: Python's own reference texts, as documents and as chats.

Two sources, both part of every CPython installation and under its licence (PSF-2.0):
- the language reference's topics, which `help("assert")` prints (`pydoc_data.topics`);
- the docstrings of the standard library: read from its sources without importing them, and, for a
  few modules written in C, taken from the imported objects.

Common questions about Python and small talk, with their answers, were written for the model: see
`questions`. Source files with a licence notice are left out.
The text is a function of the Python version and the seed.
"""

import ast
import importlib
import inspect
import keyword
import pydoc
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics as TOPICS  # noqa: N812  (a constant)
from random import Random

from slipstream_lab.demo_model.questions import (
    EVERYDAY_ANSWERS,
    FIRST_ANSWERS,
    FOLLOW_UP,
    SMALL_TALK,
    ask,
)

__all__ = [
    "TEST_QUESTIONS",
    "CorpusEntry",
    "Message",
    "answer",
    "docstrings",
    "document",
    "epoch",
    "topic_entries",
    "wordings",
]

Message = dict[str, str]
"""One chat message, as chat templates take it: `role` and `content`."""

ANSWER_CHARS = 500
MIN_DOCSTRING_CHARS = 40
DOCSTRINGS_PER_EPOCH = 150
ASKED_PER_EPOCH = {
    1: (24, 24, 24, 60),
    2: (24, 24, 24, 60),
    3: (40, 60, 60, 120),
    4: (30, 40, 60, 120),
}
"""How often an epoch of each part asks for a topic, for one of the first answers about Python and
for one of those of every day, for small talk."""
FOLLOW_UPS_PER_EPOCH = 40
FOLLOW_UP_SHARE = 0.15
"""How many conversations end with a question that refers to the turn before."""

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

GREETINGS = ("", "", "", "", "", "Hello, ", "Hi! ", "Good morning. ", "OK, ", "Well, ", "And ")
REQUESTS = (
    "Please ",
    "Can you ",
    "Could you ",
    "Would you ",
    "I want you to ",
    "You should ",
    "Now ",
)
QUESTIONS = (
    "what is {}?",
    "what are {}?",
    "what does {} do?",
    "what does {} mean?",
    "what is {} for?",
    "what is {} used for?",
    "what is the use of {}?",
    "what can I do with {}?",
    "how do I use {}?",
    "how is {} used?",
    "how does {} work?",
    "how would you use {}?",
    "when do I need {}?",
    "why is there {}?",
    "do you know what {} is?",
    "I want to learn about {}.",
    "I do not understand {}.",
    "I have a question about {}.",
)
TASKS = (
    "explain {}.",
    "explain what {} is.",
    "describe {}.",
    "define {}.",
    "tell me about {}.",
    "tell me something about {}.",
    "tell me what {} is.",
    "show me how {} works.",
    "give me an overview of {}.",
    "help me understand {}.",
    "say what {} does.",
)
BARE = ("{}", "{}?", "{} in Python", "about {}")
PLACES = ("", "", "", "", " in Python", " in the Python language", " to me", " for me", " in short")
"""How training asks about a name: greeting, request and task, or question, and where."""
FURTHER_QUESTIONS = (
    *QUESTIONS,
    "what do people mean by {}?",
    "what does one mean by {}?",
    "what precisely is {}?",
    "what is the meaning of {}?",
    "what are {} exactly?",
    "hey, what is {}?",
    "hey, how does {} work?",
    "teach me {}.",
    "teach me what {} is.",
)
FURTHER_TASKS = (*TASKS, "define {} briefly.", "describe {} briefly.", "describe {} exactly.")
FURTHER_PLACES = (*PLACES, " briefly", " briefly", " in a few words", " in brief", " exactly")
"""Further wordings, of the second part of training."""
TEST_QUESTIONS = (
    "What's {}?",
    "What exactly is {}?",
    "What is meant by {}?",
    "Could you explain {}?",
    "Could you describe {} for me?",
    "Please tell me what {} is.",
    "Explain {} in Python.",
    "Explain {} briefly.",
    "How can I use {}?",
    "Hey, what does {} do?",
    "I would like to know what {} is.",
    "teach me about {}",
)
"""How a test asks, never training: fixed before the model is trained."""
ALSO_CALLED = {
    "async": ("async function", "coroutine"),
    "class": ("class statement", "class definition"),
    "def": ("def statement", "function definition"),
    "dict": ("dictionary display",),
    "for": ("for loop",),
    "if": ("if-else", "condition"),
    "lambda": ("lambda expression", "lambda expressions", "lambda function", "lambda functions"),
    "list": ("mutable sequence",),
    "slicing": ("slice",),
    "while": ("while loop",),
    "with": ("with block",),
    "yield": ("yield expression",),
}
"""Names that `help()` does not know."""
TWO_WORDS = re.compile(
    r"(.{4,})((?:object|method|literal|identifier|attribute|name|manager|feature|string|value"
    r"|assignment)s?)"
)
"""What `help()` writes as one word: `codeobject`, `contextmanagers`."""
NOT_SAID = re.compile(r"types.+|augassign|execmodel|exprlists?|specialattrs?")
"""Labels of `help()` that are no words."""
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that explains Python.",
    "You answer questions about Python.",
    "You are Slipstream's demo model.",
)


@dataclass(frozen=True)
class CorpusEntry:
    """A name and a text about it; `heading` opens the text when it is a document."""

    names: tuple[str, ...]
    heading: str
    text: str


def topic_entries() -> list[CorpusEntry]:
    """The language reference's topics, each with the names by which it is asked for.

    These are the names by which `help()` finds it, without their articles, and its title. A name
    belongs to one topic: the one that explains the keyword of that name, if there is one.
    """
    index: dict[str, object] = {name.lower(): to for name, to in pydoc.Helper.topics.items()}
    index |= pydoc.Helper.keywords
    owners: dict[str, str] = {}
    for name, found in index.items():
        target: object = found
        while isinstance(target, str) and target:  # an alias: "and" -> "BOOLEAN"
            target = index.get(target.lower())
        if isinstance(target, tuple) and target[0] in TOPICS:
            owners[name] = target[0]
    owners |= {name: name for name in TOPICS if name.isalpha() and name not in owners}
    for name, owner in list(owners.items()):
        if name.endswith("s") and name != "ellipsis" and not keyword.iskeyword(name):
            owners.setdefault(_singular(name), owner)
    entries: dict[str, CorpusEntry] = {}
    for label, topic in sorted(TOPICS.items()):
        title, _, body = topic.strip().partition("\n")
        underline, _, rest = body.partition("\n")
        text = (body if not underline or set(underline) - set("*=") else rest).strip()
        spoken = title.replace('"', "").lower().removeprefix("the ")
        known = sorted(
            TWO_WORDS.sub(r"\1 \2", name)
            for name, owner in owners.items()
            if owner == label and not NOT_SAID.fullmatch(name)
        )
        names = [spoken, *known, *(also for name in known for also in ALSO_CALLED.get(name, ()))]
        if text in entries:  # two labels of one text
            names = [*entries[text].names, *names]
        unique = tuple(dict.fromkeys(names))
        entries[text] = CorpusEntry(unique, f"{title}\n{'=' * len(title)}", text)
    return list(entries.values())


def wordings(name: str) -> tuple[str, ...]:
    """A topic's name as people write it: with articles, in quotes, by its kind."""
    article = "an" if name[0] in "aeio" else "a"
    found = [name, f"the {name}", f"{article} {name}"]
    first, _, kind = name.partition(" ")
    if keyword.iskeyword(first) or first in ("print", "ellipsis"):
        found += [f"`{first}`{kind and ' '}{kind}", f"the `{first}`{kind and ' '}{kind}"]
        if not kind:
            found += [f"the {name} keyword", f"the keyword {name}", f'"{name}"']
    if name.endswith(" statement"):
        found += [f"{name}s", f"the Python {name}"]
    return tuple(found)


def docstrings() -> list[CorpusEntry]:
    """Docstrings of the standard library's public modules, classes and functions, each once."""
    entries: dict[str, CorpusEntry] = {}
    for entry in [*_living_docstrings(), *_source_docstrings()]:
        if len(entry.text) >= MIN_DOCSTRING_CHARS:
            entries.setdefault(entry.text, entry)
    return list(entries.values())


def document(entry: CorpusEntry) -> str:
    """The entry as a plain text: its heading, an empty line, its text."""
    return f"{entry.heading}\n\n{entry.text}"


def epoch(
    topics: list[CorpusEntry], others: list[CorpusEntry], rng: Random, *, part: int = 1
) -> tuple[list[str], list[list[Message]]]:
    """The documents and conversations of one epoch, in random words and order.

    Each of the first three parts of training has further wordings; the third asks more, the fourth
    most for the answers of every day.

    Each topic occurs once as a document and in several questions, each answer of
    `questions` in several; of the other entries some are documents.
    """
    num_topic, num_first, num_everyday, num_small_talk = ASKED_PER_EPOCH[part]
    told = rng.sample(others, min(DOCSTRINGS_PER_EPOCH, len(others)))
    turns = [
        (
            _question(rng.choice(wordings(rng.choice(entry.names))), rng, part > 1),
            answer(entry.text),
        )
        for entry in topics * num_topic
    ]
    answers = [
        *FIRST_ANSWERS * num_first,
        *EVERYDAY_ANSWERS * num_everyday,
        *SMALL_TALK * num_small_talk,
        *[FOLLOW_UP] * FOLLOW_UPS_PER_EPOCH,
    ]
    turns += [(ask(each, rng, part=part), each.text) for each in answers]
    return [document(entry) for entry in topics + told], _conversations(turns, rng, part)


def _conversations(turns: list[tuple[str, str]], rng: Random, part: int) -> list[list[Message]]:
    """The turns in random order, one to three per conversation, some under a system prompt."""
    rng.shuffle(turns)
    conversations = []
    while turns:
        messages: list[Message] = []
        if rng.random() < 0.15:
            messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
        taken = [turns.pop() for _ in range(min(len(turns), rng.choice((1, 1, 1, 1, 1, 1, 2, 3))))]
        if rng.random() < FOLLOW_UP_SHARE:
            taken.append((ask(FOLLOW_UP, rng, part=part), FOLLOW_UP.text))
        for question, reply in taken:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": reply})
        conversations.append(messages)
    return conversations


def _question(name: str, rng: Random, has_more: bool) -> str:
    """One of some thousand ways to ask about a name, and none of a test's."""
    held_out = {_bare(question.format(name)) for question in TEST_QUESTIONS}
    while _bare(question := _any_question(name, rng, has_more)) in held_out:
        pass
    return question


def _bare(question: str) -> str:
    return question.lower().rstrip("?.")


def _any_question(name: str, rng: Random, has_more: bool) -> str:
    questions = FURTHER_QUESTIONS if has_more else QUESTIONS
    tasks = FURTHER_TASKS if has_more else TASKS
    places = FURTHER_PLACES if has_more else PLACES
    roll = rng.random()
    if roll < 0.1:
        question = rng.choice(BARE).format(name)
    else:
        asked = rng.choice(questions)
        if roll < 0.5:
            asked = rng.choice(("", *REQUESTS)) + rng.choice(tasks)
        asked = asked.format(name)
        asked = asked[:-1] + rng.choice(places) + asked[-1]
        question = rng.choice(GREETINGS) + asked
        question = question[0].upper() + question[1:]
    return rng.choice((question, question, question.rstrip("?."), question.lower()))


def _singular(name: str) -> str:
    """`dictionary` for `dictionaries`."""
    stem = f"{name[:-3]}y" if name.endswith("ies") else name.removesuffix("s")
    return stem.removesuffix("e") if name.endswith("sses") else stem


def answer(text: str) -> str:
    """The first paragraphs of an entry's text that fit an answer, from its first sentence on."""
    paragraphs = [paragraph.rstrip() for paragraph in text.split("\n\n")]
    first = next((n for n, each in enumerate(paragraphs) if _is_prose(each.strip())), 0)
    answer = paragraphs[first].strip()
    for paragraph in paragraphs[first + 1 :]:
        is_announced = answer.endswith(":")
        if len(answer) + len(paragraph) > ANSWER_CHARS * (1 + is_announced):
            break
        answer += f"\n\n{paragraph}"
    return answer.strip()


def _is_prose(paragraph: str) -> bool:
    """Whether it is no heading, rule of a grammar or note on versions."""
    last = paragraph.rsplit("\n", 1)[-1]
    is_heading = not set(last) - set("=*-")  # underlined, or empty
    return not (
        is_heading or "::=" in paragraph or paragraph.startswith(("New in version", "**Source"))
    )


def _source_docstrings() -> Iterator[CorpusEntry]:
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


def _top_level(tree: ast.Module, module: str) -> Iterator[CorpusEntry]:
    """Docstrings of the module and its functions and classes, without methods."""
    yield CorpusEntry((module,), module, ast.get_docstring(tree) or "")
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not node.name.startswith("_"):
            name = f"{module}.{node.name}"
            brackets = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
            yield CorpusEntry((name,), name + brackets, ast.get_docstring(node) or "")


def _living_docstrings() -> Iterator[CorpusEntry]:
    for module_name in C_MODULES:
        prefix = "" if module_name == "builtins" else f"{module_name}."
        for name, value in sorted(vars(importlib.import_module(module_name)).items()):
            if not name.startswith("_") and callable(value):
                yield CorpusEntry((prefix + name,), prefix + name, inspect.getdoc(value) or "")
    for kind in BUILT_IN_TYPES:
        for name, value in sorted(vars(kind).items()):
            if not name.startswith("_") and callable(value):
                full = f"{kind.__name__}.{name}"
                yield CorpusEntry((full,), full, inspect.getdoc(value) or "")
