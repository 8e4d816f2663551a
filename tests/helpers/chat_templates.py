"""Small chat templates that treat an assistant's turn as those of well-known models do."""

from __future__ import annotations

from typing import Any

# ids of calls and of their answers are nine characters, as in Mistral's templates
SHORT_IDS = """\
{%- for message in messages %}
  {%- for call in message.tool_calls or [] %}
    {%- if call.id is not defined or call.id | length != 9 %}
      {{- raise_exception('ids are nine characters') }}
    {%- endif %}
    {{- '[TOOL_CALLS]' + call.function.name + (call.function.arguments | tojson) + call.id }}
  {%- endfor %}
  {%- if message.role == 'tool' %}
    {%- if message.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}
    {{- '[TOOL_RESULTS]' + message.content + message.tool_call_id }}
  {%- endif %}
{%- endfor %}"""

# one object per call; reasoning is kept behind the last question only, and prefilled if it is off
HYBRID = """\
{%- if tools %}{{ '<|im_start|>system\\nTools: <tool_call>{"name", "arguments"}</tool_call>' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
  {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
  {%- set content = message.content if message.content is string else '' %}
  {%- if message.role == 'assistant' %}
    {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
    {%- if '</think>' in content %}
      {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
      {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content }}
    {%- for call in message.tool_calls or [] %}
      {%- set arguments = call.function.arguments %}
      {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- arguments if arguments is string else arguments | tojson }}
      {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
  {%- endif %}
{%- endif %}"""

# the generation prompt opens the reasoning; history has none
ALWAYS_REASONS = """\
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\\n' + message.content.split('</think>')[-1] }}
  {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""

# arguments are text, and calls are rendered only where the content is null
NULL_CONTENT = """\
{%- for message in messages %}
  {%- if message.role == 'assistant' and not message.content is string %}
    {%- for call in message.tool_calls %}
      {{- '<call>' + call.type + ':' + call.function.name + '\\n' }}
      {{- call.function.arguments + '</call>' }}
    {%- endfor %}
  {%- else %}{{ '<' + message.role + '>' + message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% else %}{{ '<eos>' }}{% endif %}"""

# arguments are listed one by one
LISTED_ARGUMENTS = """\
{%- for message in messages %}
  {{- '<|' + message.role + '|>' }}
  {%- if message.reasoning %}{{ '<think>' + message.reasoning + '</think>' }}{% endif %}
  {{- message.content }}
  {%- for call in message.tool_calls or [] %}
    {{- '<tool_call>' + call.function.name }}
    {%- for key, value in call.function.arguments.items() %}
      {{- '<arg_key>' + key + '</arg_key><arg_value>' + value | string + '</arg_value>' }}
    {%- endfor %}{{ '</tool_call>' }}
  {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

# a turn with calls has content or thinking, not both
EITHER = """\
{%- for message in messages %}
  {%- if message.tool_calls %}
    {%- if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}
    {{- '<|analysis|>' + (message.content or message.thinking or '') }}
    {%- for call in message.tool_calls %}
      {{- '<|to|>' + call.function.name + call.function.arguments | tojson }}
    {%- endfor %}
  {%- else %}
    {{- '<|' + message.role + '|>' + (message.thinking or '') + message.content }}
  {%- endif %}
{%- endfor %}"""

# an answer that is not asked for is marked by the end of the text
ENDS_CHATS = """\
{%- for message in messages %}
  {{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think>' }}
{%- else %}{{ '<|endoftext|>' }}{% endif %}"""

# messages in channels; a generation prompt begins one
CHANNELS = """\
{%- for message in messages %}
  {{- '<|start|>' + message.role }}
  {%- if message.role == 'assistant' %}{{ '<|channel|>final' }}{% endif %}
  {{- '<|message|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

# tags of tokens with text between, as Kimi K3's; what is thought of is prefilled
TAGS = """\
{%- for message in messages %}
  {{- '<|open|>message role="' + message.role + '"<|sep|>' }}
  {%- if message.role == 'assistant' %}
    {{- '<|open|>response<|sep|>' + message.content + '<|close|>response<|sep|>' }}
  {%- else %}{{ message.content }}{% endif %}
  {{- '<|close|>message<|sep|><|end_of_msg|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|open|>message role="assistant"<|sep|><|open|>' }}
  {{- 'response' if enable_thinking is defined and enable_thinking is false else 'think' }}
  {{- '<|sep|>' }}
{%- endif %}"""

# a system turn is taken at the beginning only, as in Qwen3.5's
SYSTEM_FIRST = """\
{%- if messages[0].role == 'system' %}{{ '[system]' + messages[0].content + '[end]' }}{% endif %}
{%- for tool in tools or [] %}{{ '[tool]' + tool.function.name + '[end]' }}{% endfor %}
{%- for message in messages %}
  {%- if message.role == 'system' %}
    {%- if not loop.first %}{{ raise_exception('a system turn is the first one') }}{% endif %}
  {%- elif message.role in ('user', 'assistant', 'tool') %}
    {{- '[' + message.role + ']' + message.content }}
    {%- for call in message.tool_calls or [] %}{{ '[call]' + call.function.name }}{% endfor %}
    {{- '[end]' }}
  {%- else %}{{ raise_exception('an unknown role') }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""

# what is said first by the system begins the user's turn; roles alternate, as in Gemma 3's
ALTERNATING = """\
{%- set before = '' %}
{%- if messages[0].role == 'system' %}
  {%- set before = messages[0].content + '\n\n' %}
  {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('user and assistant take turns') }}
  {%- endif %}
  {{- '[' + message.role + ']' + (before if loop.first else '') }}
  {{- message.content | trim + '[end]' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""

# no system turn is taken, and roles alternate, as in Gemma 2's
NO_SYSTEM = """\
{%- for message in messages %}
  {%- if message.role not in ('user', 'assistant') %}
    {{- raise_exception('no such role') }}
  {%- endif %}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('user and assistant take turns') }}
  {%- endif %}
  {{- '[' + message.role + ']' + message.content + '[end]' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""

# roles alternate but for calls and their answers, as in Mistral's
ALTERNATING_BUT_FOR_CALLS = """\
{%- if messages[0].role == 'system' %}
  {{- '[system]' + messages[0].content + '[end]' }}
  {%- set messages = messages[1:] %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
  {%- if message.role != 'tool' and not message.tool_calls %}
    {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
      {{- raise_exception('user and assistant take turns') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
  {%- endif %}
{%- endfor %}
{%- for message in messages %}
  {%- if message.role == 'system' %}{{ raise_exception('a system turn is the first') }}{% endif %}
  {{- '[' + message.role + ']' + message.content }}
  {%- for call in message.tool_calls or [] %}{{ '[call]' + call.function.name }}{% endfor %}
  {{- '[end]' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""

# a system turn that is not first is left out without an error, as in those of gpt-oss, MiniMax-M2
LATE_SYSTEM_IS_LOST = """\
{%- if messages[0].role in ('system', 'developer') %}
  {{- '[system]' + messages[0].content.replace('/think', '').strip() + '[end]' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role in ('user', 'assistant', 'tool') %}
    {{- '[' + message.role + ']' + message.content }}
    {%- for call in message.tool_calls or [] %}{{ '[call]' + call.function.name }}{% endfor %}
    {{- '[end]' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""

# every system turn is left out without an error, as in Phi-3-medium's
SYSTEM_IS_LOST = """\
{%- for message in messages %}
  {%- if message.role == 'user' %}{{ '[user]' + message.content + '[end]' }}
  {%- elif message.role == 'assistant' %}{{ '[assistant]' + message.content + '[end]' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""

# any role is taken anywhere, as ChatML does
ANY_ROLE = """\
{%- for message in messages %}
  {{- '[' + message.role + ']' + message.content }}
  {%- for call in message.tool_calls or [] %}{{ '[call]' + call.function.name }}{% endfor %}
  {{- '[end]' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""

TAG_TOKENS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

CHANNEL_TOKENS = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|call|>",
    "<|return|>",
)
ADDED_TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")


def tokenizer_with(template: str | None, added_tokens: tuple[str, ...] = ADDED_TOKENS) -> Any:
    """The demo model's tokenizer with another template and more tokens."""
    from transformers import AutoTokenizer

    from slipstream.demo_model import MODEL_PATH

    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    tokenizer.add_tokens(list(added_tokens), special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer
