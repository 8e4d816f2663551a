"""Questions as people type them, each with the answer that the demo model is to give.

Three files hold them: `python_questions.txt` (common questions about Python),
`everyday_questions.txt` (those that the fourth part of training adds) and `small_talk.txt`
(greetings, and what the model cannot do). A block of either is one answer; the first character of
each further line says what the line holds, its items are separated by ` ; `:

    ~  what a right answer contains
    -  tasks, which complete "How do I ...?"
    *  names, which complete "What about ...?"
    ?  whole questions
    +  #  >  further tasks, names and whole questions, from the third part of training on
    !  questions of the tests: fixed before the model was trained, and never part of its training
    @  NAME: the words that {NAME} stands for in a question
"""

import re
from dataclasses import dataclass
from pathlib import Path
from random import Random

__all__ = [
    "EVERYDAY_ANSWERS",
    "FIRST_ANSWERS",
    "FOLLOW_UP",
    "PYTHON_ANSWERS",
    "SMALL_TALK",
    "KnownAnswer",
    "ask",
    "greet",
    "is_right",
    "plain",
    "typed",
]


@dataclass(frozen=True)
class KnownAnswer:
    """An answer, what marks it, the questions of training and those of the tests."""

    text: str
    marks: tuple[str, ...]
    tasks: tuple[str, ...]
    names: tuple[str, ...]
    questions: tuple[str, ...]
    tests: tuple[str, ...]
    more_tasks: tuple[str, ...]
    more_names: tuple[str, ...]
    more_questions: tuple[str, ...]


def _read(path: Path) -> tuple[tuple[KnownAnswer, ...], dict[str, tuple[str, ...]]]:
    """Return the answers of a file and its words for placeholders."""
    answers, words = [], {}
    for block in path.read_text(encoding="utf-8").strip().split("\n\n"):
        found: dict[str, tuple[str, ...]] = {}
        text = ""
        for line in block.split("\n"):
            kind, _, rest = line.partition(" ")
            if kind == "@":
                name, _, listed = rest.partition(": ")
                words[name] = tuple(listed.split(" ; "))
            elif len(kind) == 1 and kind in "~-*?!+#>":
                found[kind] = tuple(rest.split(" ; "))
            else:
                text = line
        if text:
            answers.append(KnownAnswer(text, *(found.get(kind, ()) for kind in "~-*?!+#>")))
    return tuple(answers), words


_HERE = Path(__file__).parent
FIRST_ANSWERS, _PYTHON_WORDS = _read(_HERE / "python_questions.txt")
EVERYDAY_ANSWERS, _EVERYDAY_WORDS = _read(_HERE / "everyday_questions.txt")
PYTHON_ANSWERS = FIRST_ANSWERS + EVERYDAY_ANSWERS
SMALL_TALK, _SMALL_WORDS = _read(_HERE / "small_talk.txt")
WORDS = {**_PYTHON_WORDS, **_EVERYDAY_WORDS, **_SMALL_WORDS}
FOLLOW_UP = next(each for each in SMALL_TALK if "question by itself" in each.text)
"""The answer to whatever refers to the turn before."""

ASKED_TASKS = (
    "how do I {}?",
    "how do I {}?",
    "how do I {}?",
    "how can I {}?",
    "how can I {}?",
    "how to {}?",
    "how to {}",
    "how do you {}?",
    "how would I {}?",
    "how would you {}?",
    "how should I {}?",
    "how does one {}?",
    "how can you {}?",
    "how could I {}?",
    "how do we {}?",
    "how is it possible to {}?",
    "what is the best way to {}?",
    "what is the easiest way to {}?",
    "what's the way to {}?",
    "what is a simple way to {}?",
    "what do I write to {}?",
    "what do I need to {}?",
    "what can I use to {}?",
    "what should I do to {}?",
    "which function do I use to {}?",
    "is there a way to {}?",
    "is there a function to {}?",
    "is it possible to {}?",
    "can I {}?",
    "can Python {}?",
    "can you {}?",
    "can you show me how to {}?",
    "can you tell me how to {}?",
    "can you explain how to {}?",
    "can someone tell me how to {}?",
    "could you tell me how I can {}?",
    "could you show me how to {}?",
    "do you know how to {}?",
    "do you know how I can {}?",
    "show me how to {}.",
    "tell me how to {}.",
    "explain how to {}.",
    "teach me to {}.",
    "give me an example of how to {}.",
    "give me code to {}.",
    "give me a line that can {}.",
    "write code to {}.",
    "what code will {}?",
    "I want to {}.",
    "I want to {}, how?",
    "I want to know how to {}.",
    "I would like to {}.",
    "I'd like to {}.",
    "I need to {}.",
    "I need to {}, what do I do?",
    "I have to {}.",
    "I am trying to {}.",
    "I'm trying to {}, how?",
    "I don't know how to {}.",
    "I must {}.",
    "help me {}.",
    "help me to {}.",
    "my question is how to {}.",
    "{}",
    "{}",
    "{}?",
    "how can i {} please?",
    "hi, how can I {}?",
    "hi, i want to {}, how does that work?",
    "hello, could you please tell me how to {}?",
    "please show me how I can {}.",
    "would you please show me how to {}?",
    "what's the best way to {}?",
    "what is the right way to {}?",
    "what is the pythonic way to {}?",
    "what's a good way to {}?",
    "what's an easy way to {}?",
    "whats the simplest way to {}",
    "what is the shortest way to {}?",
    "what is the code to {}?",
    "what would the code to {} look like?",
    "which command do I need to {}?",
    "what's the syntax to {}?",
    "how do i {} again?",
    "how exactly do I {}?",
    "how do people {}?",
    "how does python {}?",
    "how do I {} in my program?",
    "how do I {} in a script?",
    "so how do i {}?",
    "is there an easy way to {}?",
    "is there a built-in way to {}?",
    "is there some function that can {}?",
    "any way to {}?",
    "any idea how to {}?",
    "anyone know how to {}",
    "show me code to {}.",
    "show me how you {}.",
    "show me an example of how to {}.",
    "show me the code to {}.",
    "code for how to {}",
    "give me a short example to {}.",
    "give me a snippet to {}.",
    "snippet to {}",
    "one line to {}",
    "syntax to {}",
    "example code to {}",
    "simple way to {}",
    "best way to {}",
    "best way to {} in python",
    "easiest way to {}",
    "quickly {}",
    "trying to {}",
    "need to {}",
    "want to {}",
    "I just want to {}.",
    "I'd like to know how to {}.",
    "I want my program to {}.",
    "I want a function to {}.",
    "I can't figure out how to {}.",
    "I forgot how to {}.",
    "I am a beginner, how do I {}?",
    "I'm new to python, how do I {}?",
    "I'm learning python and want to {}.",
    "for my homework I have to {}.",
    "my teacher says I should {}, how?",
    "in my script I need to {}.",
    "I'm stuck, how do I {}?",
    "help, I need to {}!",
    "can u show me how to {}",
    "pls help me {}",
    "python {}",
    "python {}",
    "python how to {}",
    "python how do i {}",
    "how {}",
    "way to {}",
    "{} python",
    "{} in python",
    "example: {}",
    "code to {}",
)
ASKED_NAMES = (
    "{}",
    "{}?",
    "python {}",
    "{} python",
    "{} in Python",
    "about {}",
    "what about {}?",
    "what is {}?",
    "what's {}?",
    "what are {}?",
    "what is {} for?",
    "what is {} good for?",
    "what does {} do?",
    "what does {} mean?",
    "how does {} work?",
    "how do I use {}?",
    "how can I use {}?",
    "how do you use {}?",
    "how is {} used?",
    "how to use {}",
    "how do I do {}?",
    "how does {} go?",
    "how to do {}",
    "when do I use {}?",
    "why do I need {}?",
    "explain {}.",
    "explain {} to me.",
    "describe {}.",
    "tell me about {}.",
    "tell me something about {}.",
    "tell me what {} is.",
    "can you explain {}?",
    "could you explain {}?",
    "can you show me {}?",
    "show me {}.",
    "show me an example of {}.",
    "give me an example of {}.",
    "give an example of {}.",
    "{} example",
    "example of {}",
    "an example for {}, please",
    "python {} example",
    "{} explained",
    "I do not understand {}.",
    "I don't understand {}.",
    "I have a question about {}.",
    "I want to know about {}.",
    "I want to learn {}.",
    "I'd like to understand {}.",
    "help with {}",
    "help me with {}.",
    "I need help with {}.",
    "what do you know about {}?",
    "do you know {}?",
    "do you know what {} is?",
    "whats {}",
    "what is {} in python",
    "what is {} about?",
    "what is {} used for?",
    "what is the point of {}?",
    "what is the purpose of {}?",
    "what is the use of {}?",
    "why is there {}?",
    "why would I use {}?",
    "when should I use {}?",
    "where is {} used?",
    "how do I write {}?",
    "how does {} look?",
    "how do i work with {}?",
    "please explain {}.",
    "could you please explain {} to me?",
    "can you explain {} simply?",
    "explain {} to a beginner.",
    "explain {} like I'm five.",
    "show me how {} works.",
    "show me code for {}.",
    "code for {}",
    "code example for {}",
    "simple example of {}",
    "{} tutorial",
    "{} syntax",
    "{} meaning",
    "{} usage",
    "{} how",
    "how to {}",
    "i need {}",
    "I'm confused about {}.",
    "I am learning about {}.",
    "I read about {}, what is that?",
    "never understood {}",
    "learn {}",
    "anything about {}?",
)
FURTHER_NAMES = (
    *ASKED_NAMES,
    "how are {} made?",
    "how are {} used?",
    "how is {} done?",
    "how do {} work?",
    "what is {}, briefly?",
    "explain {} briefly.",
    "what exactly is {}?",
    "what does {} look like?",
    "{} in a few words",
)
"""Further wordings, of the second part of training."""
GREETINGS = ("Hello, ", "Hi, ", "Hi! ", "Hey, ", "Hello! ", "Good morning. ", "OK, ", "Well, ")
PLEAS = (
    "Please, ",
    "Sorry, ",
    "Quick question: ",
    "A question: ",
    "So ",
    "And ",
    "Now ",
    "Then ",
    "Hm, ",
    "Ok so ",
    "Btw ",
)
PLACES = (" in Python", " in Python", " in Python", " with Python", " using Python", " in Python 3")
ENDINGS = (" please", ", please", " pls", " thanks", ", thank you", ", thanks in advance")
ALIKE = tuple(
    tuple(group.split("|"))
    for group in (
        "a list|my list|the list|a Python list|lists|list|this list|an list|some list",
        "a string|my string|the string|strings|string|a str|a text|some string|a Python string",
        "a file|my file|the file|files|file|some file",
        "a dictionary|a dict|my dict|my dictionary|the dictionary|dictionaries|dict|dicts",
        "a dict|a dictionary|my dict|the dict|dictionary",
        "a number|numbers|my number|the number|an integer|a float",
        "a function|my function|the function|functions|function",
        "a class|my class|the class|my own class|classes",
        "a loop|my loop|the loop|loops|a for loop",
        "a folder|a directory|my folder|the folder|the directory",
        "a variable|my variable|variables|the variable",
        "an item|an element|a value|items|elements|one item|something|some item|the item|a thing",
        "an element|an item|a value|the element",
        "a value|an item|the value|values|something",
        "a key|the key|some key|keys",
        "a word|words|the word|a substring|some word",
        "an exception|exceptions|an error|errors|the exception",
        "a module|modules|the module|a library",
        "a package|packages|a library|some package",
        "items|elements|values|entries|things",
        "delete|remove|erase|drop|get rid of|take out",
        "remove|delete|drop|get rid of|take out|eliminate",
        "make|create|build|get|have|write",
        "create|make|build|set up|define|generate",
        "check|test|see|find out|know|tell|determine|verify",
        "find|get|look for|search for|determine",
        "get|find|obtain|read|have|fetch|retrieve",
        "convert|change|turn|transform|cast|make",
        "print|show|display|output|write",
        "join|combine|merge|put together|connect",
        "combine|join|merge|unite|put together",
        "loop over|iterate over|go over|go through|walk through|loop through|iterate through",
        "write|make|create|define|do",
        "use|work with|apply|do|write",
        "read|load|get|open|import",
        "add|put|append|insert",
        "start|begin|launch|run",
        "run|execute|start|launch",
        "wait|pause|sleep",
        "stop|end|exit|leave|quit",
        "fix|solve|avoid|get rid of|repair|handle",
        "sort|order|arrange|rank",
        "reverse|flip|turn around|invert",
        "count|find|determine|calculate",
        "calculate|compute|find|get|work out",
        "largest|biggest|greatest|highest|maximum",
        "smallest|lowest|least|minimum",
        "check if|check whether|test if|see whether|find out if|tell if|know whether|verify that",
        "test whether|check if|see if|find out whether|tell whether|know if",
        "into|to|in",
        "contains|has|includes|holds",
        "exists|is there|is present",
        "the difference|differences",
    )
)


ING_TASKS = (
    "{}",
    "{}?",
    "python {}",
    "{} in Python",
    "about {}",
    "what about {}?",
    "how about {}?",
    "what is a good way of {}?",
    "what is the best way of {}?",
    "is there an easy way of {}?",
    "which way of {} is best?",
    "is {} possible?",
    "what is used for {}?",
    "what do I use for {}?",
    "what is needed for {}?",
    "what helps with {}?",
    "I need help with {}.",
    "I have trouble {}.",
    "I have a problem with {}.",
    "explain {}.",
    "show me {}.",
    "an example of {}",
    "how does {} work?",
    "how do I go about {}?",
)
PASSIVE_TASKS = (
    "how {be} {thing} {done}?",
    "how {be} {thing} {done}?",
    "how {be} {thing} {done}?",
    "how can {thing} be {done}?",
    "how could {thing} be {done}?",
    "how should {thing} be {done}?",
    "can {thing} be {done}?",
    "what does it take to get {thing} {done}?",
    "how do I get {thing} {done}?",
    "how can I get {thing} {done}?",
    "how can I have {thing} {done}?",
    "I want to have {thing} {done}.",
    "I want {thing} {done}.",
    "I need {thing} {done}.",
    "how does one get {thing} {done}?",
    "where {be} {thing} {done}?",
    "{thing} {done}",
)
"""Forms of a task in the third part of training: `sorting a list`, and `a list` `sorted`."""
IRREGULAR = {
    "begin": "begun",
    "break": "broken",
    "build": "built",
    "catch": "caught",
    "choose": "chosen",
    "cut": "cut",
    "do": "done",
    "draw": "drawn",
    "find": "found",
    "give": "given",
    "hide": "hidden",
    "hold": "held",
    "keep": "kept",
    "leave": "left",
    "let": "let",
    "make": "made",
    "pay": "paid",
    "put": "put",
    "read": "read",
    "run": "run",
    "say": "said",
    "see": "seen",
    "send": "sent",
    "set": "set",
    "show": "shown",
    "split": "split",
    "take": "taken",
    "tell": "told",
    "throw": "thrown",
    "write": "written",
}
DOUBLED = re.compile("chop|cut|drop|flip|get|let|map|pop|put|run|set|skip|split|stop|swap|trim")
NO_PASSIVE = re.compile("be|do|get|have|know|learn|let|make|see")
"""First words of tasks whose object is often none, as in `know if ...` or `get rid of ...`."""
FILLERS = re.compile("a|an|the|my|some|of|to|in|is|that|i|its|do|it|with")
"""Words that people leave out when they type a few words into a search box."""

SYNONYMS = {
    key: tuple(group.split("|"))
    for keys, group in (
        ("element|item|value|entry", "element|item|value|entry"),
        ("elements|items|values|entries", "elements|items|values|entries|things"),
        ("dictionary|dict", "dictionary|dict|map"),
        ("dictionaries|dicts", "dictionaries|dicts"),
        ("list|array", "list|array|list of things"),
        ("folder|directory", "folder|directory"),
        ("folders|directories", "folders|directories"),
        ("text|string", "text|string|str|sentence|word|line of text"),
        ("word", "word|string|name|term"),
        ("words", "words|strings|names|terms"),
        ("sentence", "sentence|text|line|string"),
        ("letter|character", "letter|character|char|sign"),
        ("letters|characters", "letters|characters|chars|signs"),
        ("program|script", "program|script|code|application"),
        ("package|library", "package|library"),
        ("packages|libraries", "packages|libraries"),
        ("largest|biggest|greatest|highest", "largest|biggest|greatest|highest|maximal|top"),
        ("smallest|lowest|least", "smallest|lowest|least|minimal"),
        ("delete|remove|erase", "delete|remove|erase|drop|eliminate|take out|throw away|wipe"),
        ("get|find|obtain", "get|find|obtain|have|fetch|receive|look up|see"),
        ("show|print|display", "show|print|display|output|write out"),
        ("make|create|build", "make|create|build|set up|generate|produce|have|form"),
        ("combine|merge|join", "combine|merge|join|unite|put together|connect|link"),
        ("check|test", "check|test|see|find out|know|determine|tell|verify|discover|learn"),
        ("change", "change|modify|alter|update|edit|adapt|set"),
        ("begin|start", "begin|start|launch"),
        ("stop|end", "stop|end|finish|halt|quit"),
        ("save|store", "save|store|keep|put away"),
        ("position|place", "position|place|spot|location|index"),
        ("several|many", "several|many|multiple|a number of|lots of|more than one"),
        ("two", "two|both|a pair of|2"),
        ("together", "together|into one|as one"),
        ("backwards", "backwards|in reverse|the other way round|from the end"),
        ("convert|turn", "convert|turn|change|transform|make"),
        ("use", "use|apply|employ|work with|handle"),
        ("read|load", "read|load|get|open|take in"),
        ("error|exception", "error|exception|failure"),
        ("errors|exceptions", "errors|exceptions|failures|problems"),
        ("contains|has", "contains|has|includes|holds|possesses"),
        ("contain|have", "contain|have|include|hold"),
        ("wait|pause", "wait|pause|sleep|rest"),
        ("choose|pick|select", "choose|pick|select|take|draw"),
        ("repeat", "repeat|do again|redo|run again"),
        ("first", "first|1st|leading|front"),
        ("last", "last|final|rear"),
        ("always|forever", "always|forever|for ever|endlessly|all the time"),
        ("each|every", "each|every|all|every single"),
        ("call|run", "call|run|execute|invoke|start"),
        ("fast|quick", "fast|quick|rapid"),
        ("add|append", "add|append|put|attach|insert|include"),
        ("count", "count|tally|number|total"),
        ("empty", "empty|void|without content|blank"),
        ("the same|equal", "the same|equal|identical|alike"),
        ("without", "without|with no|not using"),
        ("download", "download|fetch|get|load"),
        ("write", "write|make|create|put"),
        ("split", "split|divide|cut|separate|break|chop"),
        ("replace", "replace|exchange|substitute|swap|change"),
        ("exchange|swap", "exchange|swap|switch|interchange|trade"),
        ("once", "once|one time|a single time"),
        ("times", "times|x"),
        ("loop over|go over|go through", "loop over|go over|go through|walk over|visit|run over"),
    )
    for key in keys.split("|")
}
"""Words that the third part of training exchanges for others, where `ALIKE` has no better ones."""
_SYNONYM = re.compile(
    rf"(?<![\w.])(?:{'|'.join(sorted(SYNONYMS, key=len, reverse=True))})(?![\w.(])"
)


def ask(answer: KnownAnswer, rng: Random, *, part: int = 1) -> str:
    """Return one of the many ways to ask for `answer`, but none of a test's.

    Each of the first three parts of training has wordings of its own and those of the parts before
    it. From the third on they also avoid what differs from a test's question by a single word.
    """
    while _is_held_out(question := _any_question(answer, rng, part)):
        pass
    return question


def is_right(reply: str, answer: KnownAnswer) -> bool:
    """Return whether a reply has all marks of `answer`, and those of no other answer."""
    return all(mark in reply for mark in answer.marks) and not any(
        all(mark in reply for mark in other.marks)
        and not all(mark in answer.text for mark in other.marks)
        for other in (*PYTHON_ANSWERS, *SMALL_TALK)
    )


def plain(question: str) -> str:
    """Return a question's letters, digits and signs in lower case, with single spaces."""
    return " ".join(re.sub(r"[?!.,:;'\"`]", " ", question.lower()).split())


def greet(question: str, rng: Random) -> str:
    """Open and close a question as people do: a greeting, a plea, thanks."""
    if rng.random() < 0.15:
        question = rng.choice(GREETINGS) + question
    elif rng.random() < 0.08:
        question = rng.choice(PLEAS) + question
    if rng.random() < 0.08:
        end = question[-1] if question[-1] in "?." else ""
        question = question.removesuffix(end) + rng.choice(ENDINGS) + end
    return question


def typed(question: str, rng: Random) -> str:
    """Type a question as people do: with and without capitals, full stops and slips."""
    roll = rng.random()
    if roll < 0.35:
        question = question.lower()
    elif roll < 0.9:
        question = question[:1].upper() + question[1:]
    elif roll < 0.91:
        question = question.upper()
    roll = rng.random()
    if roll < 0.4 and len(question) > 3:
        question = question.rstrip("?.")
    elif roll < 0.45:
        question = question.rstrip("?.") + rng.choice(("??", " ?", "!", "?!", "...", "."))
    if rng.random() < 0.2:
        question = question.replace("'", "")
    if rng.random() < 0.07 and len(question) > 12:
        question = _slip(question, rng)
    return question


def _slip(text: str, rng: Random) -> str:
    """Leave out, double or exchange a letter."""
    at = rng.randrange(1, len(text) - 1)
    return rng.choice(
        (
            text[:at] + text[at + 1 :],
            text[:at] + text[at] + text[at:],
            text[: at - 1] + text[at] + text[at - 1] + text[at + 1 :],
        )
    )


def _any_question(answer: KnownAnswer, rng: Random, part: int) -> str:
    if answer.tasks or answer.names:
        return _python_question(answer, rng, part)
    questions = answer.questions + (answer.more_questions if part > 2 else ())
    question = _filled(rng.choice(questions), rng)
    while part > 2 and is_near_a_test(question):
        question = _filled(rng.choice(questions), rng)
    return typed(greet(question, rng) if " " in question and rng.random() < 0.3 else question, rng)


def _filled(question: str, rng: Random) -> str:
    """Put a random word in each placeholder."""
    return re.sub(r"\{(\w+)\}", lambda found: rng.choice(WORDS[found[1]]), question)


def _python_question(answer: KnownAnswer, rng: Random, part: int) -> str:
    question = _bare_question(answer, rng, part)
    while part > 2 and is_near_a_test(question):
        question = _bare_question(answer, rng, part)
    if rng.random() < 0.3 and "ython" not in question:
        end = question[-1] if question[-1] in "?." else ""
        question = question.removesuffix(end) + rng.choice(PLACES) + end
    return typed(greet(question, rng), rng)


def _bare_question(answer: KnownAnswer, rng: Random, part: int) -> str:
    """A question without a greeting and a place."""
    if part > 2:
        tasks = answer.tasks + answer.more_tasks
        names, wholes = answer.names + answer.more_names, answer.questions + answer.more_questions
        kinds = "-" * 12 * bool(tasks) + "*" * 4 * bool(names) + "?" * 4 * bool(wholes)
    else:
        tasks, names, wholes = answer.tasks, answer.names, answer.questions
        kinds = "-" * 10 * bool(tasks) + "*" * 5 * bool(names) + "?" * 4 * bool(wholes)
    kind = rng.choice(kinds)
    if kind == "-" and part > 2:
        return _told(_exchanged(_reworded(_filled(rng.choice(tasks), rng), rng), rng), rng)
    if kind == "-":
        return rng.choice(ASKED_TASKS).format(_reworded(rng.choice(tasks), rng))
    if kind == "*":
        asked = rng.choice(ASKED_NAMES if part == 1 else FURTHER_NAMES)
        return asked.format(_filled(rng.choice(names), rng))
    return _filled(rng.choice(wholes), rng)


def _told(task: str, rng: Random) -> str:
    """Return a task in one of four forms, mostly as a sentence with its verb."""
    verb, _, rest = task.partition(" ")
    roll = rng.random()
    if roll < 0.15:
        return _searched(task, rng)
    if roll < 0.25 and verb.isalpha():
        return rng.choice(ING_TASKS).format(f"{_ing(verb)} {rest}".strip())
    thing, *after = re.split(r"( (?:in|into|from|to|with|at|by|for|on|as|if)\b.*)", rest)
    if roll < 0.38 and thing and verb.isalpha() and not NO_PASSIVE.fullmatch(verb):
        be = "are" if thing.endswith("s") and not thing.endswith("ss") else "is"
        done = _done(verb) + "".join(after)
        return rng.choice(PASSIVE_TASKS).format(be=be, thing=thing, done=done)
    return rng.choice(ASKED_TASKS).format(task)


def _searched(task: str, rng: Random) -> str:
    """Return a task as it is typed into a search box."""
    words = [word for word in task.split() if not FILLERS.fullmatch(word) or rng.random() < 0.2]
    if rng.random() < 0.15:
        rng.shuffle(words)
    return " ".join(rng.choice((words, words, ["python", *words], [*words, "python"])))


def _ing(verb: str) -> str:
    if DOUBLED.fullmatch(verb):
        return f"{verb}{verb[-1]}ing"
    return f"{verb if verb.endswith('ee') else verb.removesuffix('e')}ing"


def _done(verb: str) -> str:
    if verb in IRREGULAR:
        return IRREGULAR[verb]
    if DOUBLED.fullmatch(verb):
        return f"{verb}{verb[-1]}ed"
    if verb.endswith("y") and verb[-2] not in "aeo":
        return f"{verb[:-1]}ied"
    return f"{verb.removesuffix('e')}ed"


def _reworded(task: str, rng: Random) -> str:
    """Exchange some words for others that mean the same here."""
    for group in ALIKE:
        if group[0] in task and rng.random() < 0.35:
            task = re.sub(rf"\b{group[0]}\b", rng.choice(group), task, count=1)
    return task


def _exchanged(text: str, rng: Random) -> str:
    """Exchange some words for others that often mean the same."""
    if rng.random() < 0.3:
        return text
    return _SYNONYM.sub(
        lambda found: rng.choice(SYNONYMS[found[0]]) if rng.random() < 0.25 else found[0], text
    )


def is_near_a_test(question: str) -> bool:
    """Return whether a question has the words of a test's of five or more, but for one word."""
    words = tuple(plain(question).split())
    return words in _NEAR or any(left in _NEAR for left in _without_one(words))


def _without_one(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [words[:n] + words[n + 1 :] for n in range(len(words))]


def _is_held_out(question: str) -> bool:
    words = plain(question)
    return words in _SHORT_TESTS or any(test in words for test in _LONG_TESTS)


_TESTS = {plain(test) for each in (*PYTHON_ANSWERS, *SMALL_TALK) for test in each.tests}
_LONG_TESTS = tuple(sorted(test for test in _TESTS if test.count(" ") >= 2))
_SHORT_TESTS = frozenset(_TESTS)
_NEAR = frozenset(
    form
    for words in (tuple(test.split()) for test in _TESTS)
    if len(words) >= 5
    for form in (words, *_without_one(words))
)
