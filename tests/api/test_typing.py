"""What type checkers say of users' programs, from outside the repository."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest
from tests.helpers.pages import blocks

from slipstream.stack.settings import StackOptions, StackSettings
from slipstream_ipc.messages import (
    RepetitionDetection,
    RepetitionOptions,
    SamplingOptions,
    SamplingParams,
    StructuredOptions,
    StructuredOutputs,
)

REPOSITORY = Path(__file__).parents[2]
CHECKERS = {
    "mypy": ["mypy", "--check-untyped-defs", "--cache-dir=../mypy-cache", "--config-file=mypy.ini"],
    "pyright": ["basedpyright", "--level", "error"],
}

# half of what mypy reads, and no type of which a program sees: the tokenizer's are elsewhere
UNREAD = """
[mypy]
[mypy-torch.*,transformers.models.*]
follow_imports = skip
"""

RIGHT = """
from collections.abc import Sequence
from typing import Unpack

from slipstream import LLM, AsyncClient, Client, SamplingParams, Stack, StructuredOutputs
from slipstream import CallOptions, ChatMessage, RepetitionDetection, RequestOptions
from slipstream import TextPrompt, TokensPrompt
from slipstream import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart

params = SamplingParams(temperature=0.5, stop=["x"], stop_token_ids=[1, 2], bad_words=["no"])
SamplingParams(stop="x", allowed_token_ids=[3], logit_bias={4: -1.0}, stream_interval=4)
SamplingParams(stop=None, structured_outputs=StructuredOutputs(choice=["yes", "no"]))
SamplingParams(repetition_detection=RepetitionDetection(max_pattern_size=20, min_count=4))
SamplingParams(repetition_detection={"max_pattern_size": 20, "min_count": 4})
prompts: list[TextPrompt] = [{"prompt": "a text"}]
tokens: TokensPrompt = {"prompt_token_ids": [1, 2, 3]}
messages = [{"role": "user", "content": "What is a list?"}]

with LLM("simulated:", max_num_seqs=4, api_key=["a"], verbose=True) as llm:
    first: str = llm.generate("a text", params)[0].outputs[0].text
    llm.generate(prompts, [params], use_tqdm=False)
    llm.generate(tokens)
    llm.generate([[1, 2], [3]])
    llm.chat(messages, params)
    llm.chat([messages, messages])
    calls = llm.chat(messages, tools=[ord], tool_choice="none")[0].outputs[0].tool_calls
    named: list[tuple[str, str]] = [(call.name, call.arguments) for call in calls]
    llm.generate("a text", max_tokens=3, n=2, use_tqdm=False)
    llm.chat(messages, max_tokens=3, tools=[{"type": "function"}], continue_final_message=True)
    total: float | None = llm.generate(tokens, logprobs=0)[0].outputs[0].cumulative_logprob
    metrics = llm.generate(tokens)[0].metrics
    if metrics is not None and metrics.first_token_time is not None:
        wait_s: float = metrics.first_token_time - metrics.arrival_time
    ids_of_it: list[int] = llm.get_tokenizer().encode("a text")

with Stack("simulated:", runtime_dir="/tmp/x", http_port=0) as stack, stack.client() as client:
    for delta in client.stream("Once", max_tokens=100, stop=["x"]):
        ids: Sequence[int] = delta.token_ids
        for event in delta.events:
            match event:
                case ContentDelta(new) | ReasoningDelta(new) | ToolCallArguments(_, new):
                    print(new.strip())
                case ToolCallStart(number, call_id, name):
                    print(number + 1, call_id.strip(), name.strip())
                case ToolCallEnd(number):
                    print(number + 1)
    text: str = client.generate(messages, params).text
    turn: ChatMessage = client.generate(messages, parse_answer=True, stop_scope="all").message
    client.generate("Once", sampling_params=params, label="mine", priority=1, cache_salt=None)
    client.generate(messages, add_generation_prompt=False, max_tokens=3)
    client.stream("Once", max_tokens=3, stream_id="ab" * 16).accepted(timeout_s=1.0)
    client.generate_many(["a", [1, 2], messages], logprobs=2)
    client.generate_many(["a"], on_done=lambda each: len(each.text))
    for index, delta in client.stream_many(["a", "b"], seed=1):
        print(index + 1, delta.text)


def first_line(client: Client, prompt: str, **options: Unpack[RequestOptions]) -> str:
    return client.generate(prompt, **options).text.partition("\\n")[0]


def texts(client: Client, prompts: list[str], **options: Unpack[CallOptions]) -> list[str]:
    return [each.text for each in client.generate_many(prompts, **options)]


first_line(client, "Once", max_tokens=3, label="mine")
texts(client, ["Once"], temperature=0, tools=None)


async def main() -> None:
    async with AsyncClient() as client:
        async for delta in client.stream("Once", top_p=0.9, prompt_logprobs=1):
            print(delta.text)
        print((await client.generate("Once", n=2)).choices[0].text)
        await client.stream("Once", max_tokens=3, output_kind="final").accepted()
        compact = StructuredOutputs(json_object=True, disable_any_whitespace=True)
        await client.generate_many(["a"], structured_outputs=compact, priority=2)
"""

WRONG = (
    'client.stream("Once", max_token=100)',
    'client.generate("Once", temprature=0)',
    'client.generate("Once", stop=5)',
    'client.generate("Once", lable="x")',
    'client.stream_many(["Once"], label="x")',
    'client.tokenize("Once", tolls=[])',
    'SamplingParams(max_tokens="many")',
    "SamplingParams(stops=[])",
    'LLM("simulated:", max_seqs=4)',
    'LLM("simulated:", dtype="float8")',
    'Stack("simulated:", http_prt=0)',
)


HEAD = "from slipstream import LLM, Client, SamplingParams, Stack\n\nclient = Client()\n"


@pytest.fixture(scope="module", params=CHECKERS)
def complaints(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """What a checker says of each program, none of which lies in the repository. It looks at all of
    them at once, as it reads what they import for most of a minute.
    """
    folder = tmp_path_factory.mktemp("programs")
    shown = [block.text for block in blocks("python")]
    shown += [path.read_text() for path in sorted((REPOSITORY / "examples").rglob("*.py"))]
    programs = {f"shown{number}.py": text for number, text in enumerate(shown)}
    programs |= {"right.py": RIGHT, "wrong.py": HEAD + "\n".join(WRONG) + "\n"}
    for name, text in programs.items():
        (folder / name).write_text(text)
    (folder / "mypy.ini").write_text(UNREAD)
    command, *options = CHECKERS[request.param]
    if request.param == "pyright":
        options += ["--pythonpath", sys.executable]
        (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    done = subprocess.run(
        [Path(sys.executable).with_name(command), *options, *programs],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr  # as it finds mistakes
    said: dict[str, list[str]] = {name: [] for name in [*programs, "elsewhere"]}
    for line in filter(re.compile(r":\d+:.* error:").search, done.stdout.splitlines()):
        path = folder / line.strip().partition(":")[0]
        said[path.name if path.parent == folder else "elsewhere"].append(line)
    return said


@pytest.mark.process
def test_checkers_accept_users_programs(complaints: dict[str, list[str]]) -> None:
    assert complaints["right.py"] == complaints["elsewhere"] == []


@pytest.mark.process
def test_checkers_accept_the_pages_programs_and_the_examples(
    complaints: dict[str, list[str]],
) -> None:
    num_examples = len(list((REPOSITORY / "examples").rglob("*.py")))
    shown = {name: said for name, said in complaints.items() if name.startswith("shown")}
    assert len(shown) > 10 + num_examples > 13
    assert not any(shown.values()), shown


@pytest.mark.process
def test_checkers_find_each_mistake(complaints: dict[str, list[str]]) -> None:
    told = "\n".join(complaints["wrong.py"])
    found = {int(line) for line in re.findall(r"wrong\.py:(\d+):[^\n]*error", told)}
    first = HEAD.count("\n") + 1
    assert found == set(range(first, first + len(WRONG))), told


@pytest.mark.parametrize(
    ("options", "struct", "without"),
    [
        (SamplingOptions, SamplingParams, set()),
        (StructuredOptions, StructuredOutputs, set()),
        (RepetitionOptions, RepetitionDetection, set()),
        (StackOptions, StackSettings, {"model"}),
    ],
)
def test_options_are_the_fields(options: type, struct: type, without: set[str]) -> None:
    fields = {field.name for field in msgspec.structs.fields(struct)}
    assert set(get_type_hints(options)) == fields - without


def test_a_folder_of_that_name_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "slipstream").mkdir()  # as a clone's parent folder has it
    done = subprocess.run(
        [sys.executable, "-c", "import slipstream; print(slipstream.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()).name == "__init__.py"
