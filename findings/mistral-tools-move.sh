#!/usr/bin/env bash
# Versions:  mistral-common 1.13.1, sentencepiece 0.2.3 (Python 3.11 to 3.13).
# Guess:     a conversation's prompt begins with the prompt, and the answer, of the turn before; so with a prefix cache
#            each turn prefills what is new: the last answer and the question. Most of all the system prompt and the
#            tools, which are longest and never change, are computed once.
# Behaviour: Mistral's own formats write the tools before the *last* user message, in v2, v3 and v7, with either kind of
#            tokenizer, and v2 and v3 the system prompt too. So with each question they move to the end: what was cached
#            ends at the question before, and tools, system prompt, the last answer and its calls are prefilled each
#            turn. Another system prompt or other tools, on the other hand, cost nothing but themselves. Within a turn,
#            between a call and its result, they stay where they are. v7's system prompt stays at the front; v1, which
#            has no tools, keeps it there as well.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check mistral-common==1.13.1 sentencepiece==0.2.3
cat >"$folder/turns.py" <<'PROGRAM'
import sys
from os.path import commonprefix

from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, ToolMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import Function, FunctionCall, Tool, ToolCall
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

SYSTEM = [SystemMessage(content="Answer in one short sentence. " * 20)]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "Its name. " * 10}}}
TOOLS = [Tool(function=Function(name=f"weather_{n}", description="Today's.", parameters=SCHEMA)) for n in range(5)]


def turns(count, system, with_calls):
    """A conversation of `count` answered questions and one that is open."""
    messages = list(system)
    for turn in range(count):
        messages.append(UserMessage(content=f"Question {turn}?"))
        if with_calls:
            call = ToolCall(id=f"abcdefgh{turn}", function=FunctionCall(name="weather_0", arguments='{"city": "Bonn"}'))
            messages.append(AssistantMessage(tool_calls=[call]))
            messages.append(ToolMessage(tool_call_id=call.id, name="weather_0", content='{"degrees": 3}'))
        messages.append(AssistantMessage(content=f"Answer {turn}."))
    return [*messages, UserMessage(content=f"Question {count}?")]


def tokens(tokenizer, messages, tools):
    return tokenizer.encode_chat_completion(ChatCompletionRequest(messages=messages, tools=tools)).tokens


made = {"v1": MistralTokenizer.v1(), "v2": MistralTokenizer.v2(), "v3": MistralTokenizer.v3()}
made |= {"v3 tekken": MistralTokenizer.v3(is_tekken=True), "v7": MistralTokenizer.v7()}
is_so = True
for name, tokenizer in made.items():
    for what, system, tools in (("neither", [], None), ("system", SYSTEM, None), ("tools", [], TOOLS)):
        if tools and name == "v1":
            continue
        first, second = (tokens(tokenizer, turns(count, system, bool(tools)), tools) for count in (3, 4))
        shared = len(commonprefix([first, second]))
        print(f"{name:9} {what:7}: the {len(second):4} tokens of a turn begin with {shared} of the last's {len(first)}")
        moves = what == "tools" or (what == "system" and name in ("v2", "v3", "v3 tekken"))
        is_so &= shared < len(first) - 100 if moves else shared == len(first)
    if name == "v1":
        continue
    answered = turns(3, [], True)
    call = ToolCall(id="abcdefgh9", function=FunctionCall(name="weather_0", arguments='{"city": "Bonn"}'))
    result = ToolMessage(tool_call_id=call.id, name="weather_0", content='{"degrees": 3}')
    going_on = [*answered, AssistantMessage(tool_calls=[call]), result]
    before, after = (tokens(tokenizer, each, TOOLS) for each in (answered, going_on))
    stays = commonprefix([before, after]) == before
    print(f"{name:9} within a turn: {len(after)} tokens behind a call", "begin" if stays else "do not begin", end=" ")
    print(f"with the {len(before)} before it")
    is_so &= stays
sys.exit(0 if is_so else "tools and system prompts stand elsewhere now")
PROGRAM
"$folder/venv/bin/python" "$folder/turns.py"
