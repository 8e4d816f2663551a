"""How each coding agent is installed, pointed at a server, asked, and asked again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MODEL = "played"
QUESTION = "Which fruits does {agent} see in the two files?"
AGAIN = "And once more?"
FILES = {"one.txt": "apples-inside", "two.txt": "pears-inside"}
ANSWER = "Apples and pears."
ANSWER_AGAIN = "Apples again."
# Nothing but the server is asked for anything.
OFFLINE = {
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1",
}


@dataclass(frozen=True)
class Agent:
    """package: of npm. program: in node_modules. ask, go_on: its arguments for a first question and
    for one that continues the session; none if it does that in a terminal alone. files: by path in
    its home, or in its folder of work if the path begins with `work/`. `{server}` is the server's
    address in these and in the environment, `{agent}` the agent's name in arguments.
    tool: reads a file. arguments: of its call. ignored: what the server names of its requests.
    """

    package: str
    program: str
    ask: tuple[str, ...]
    go_on: tuple[str, ...]
    tool: str
    arguments: Callable[[str], dict[str, Any]]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()


def _command(file: str) -> dict[str, Any]:
    return {"command": f"cat {file}"}


CODEX = Agent(
    package="@openai/codex",
    program=".bin/codex",
    ask=("exec", "--skip-git-repo-check", QUESTION),
    go_on=("exec", "resume", "--last", "--skip-git-repo-check", AGAIN),
    tool="exec_command",
    arguments=lambda file: {"cmd": f"cat {file}"},
    files={
        ".codex/config.toml": f"""\
model = "{MODEL}"
model_provider = "slipstream"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[model_providers.slipstream]
name = "Slipstream"
base_url = "{{server}}/v1"
wire_api = "responses"

[analytics]
enabled = false
"""
    },
    ignored=frozenset({"tools.web_search"}),
)
PI = Agent(
    package="@mariozechner/pi-coding-agent",
    program=".bin/pi",
    ask=("-p", "--provider", "slipstream", "--model", MODEL, QUESTION),
    go_on=("-p", "--continue", "--provider", "slipstream", "--model", MODEL, AGAIN),
    tool="bash",
    arguments=_command,
    environment={"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"},
    files={
        ".pi/agent/models.json": json.dumps(
            {
                "providers": {
                    "slipstream": {
                        "baseUrl": "{server}/v1",
                        "api": "openai-completions",
                        "apiKey": "none",
                        "models": [
                            {
                                "id": MODEL,
                                "reasoning": True,
                                "contextWindow": 200_000,
                                "maxTokens": 4096,
                            }
                        ],
                    }
                }
            },
            indent=2,
        )
    },
)
# `claude` is put in place by a script at installation; the program lies in the platform's package.
CLAUDE_CODE = Agent(
    package="@anthropic-ai/claude-code",
    program="@anthropic-ai/claude-code-linux-x64/claude",
    ask=("-p", "--allowedTools", "Bash", "--", QUESTION),
    go_on=("-p", "--continue", "--", AGAIN),
    tool="Bash",
    arguments=_command,
    environment={
        "ANTHROPIC_BASE_URL": "{server}",
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    },
)
# As with `claude`, the program lies in the platform's package.
OPENCODE = Agent(
    package="opencode-ai",
    program="opencode-linux-x64/bin/opencode",
    ask=("run", QUESTION),
    go_on=("run", "--continue", AGAIN),
    tool="bash",
    arguments=_command,
    environment={"OPENCODE_DISABLE_MODELS_FETCH": "1"},
    files={
        ".config/opencode/opencode.json": json.dumps(
            {
                "autoupdate": False,
                "share": "disabled",
                "model": f"slipstream/{MODEL}",
                "provider": {
                    "slipstream": {
                        "npm": "@ai-sdk/openai-compatible",
                        "name": "Slipstream",
                        "options": {"baseURL": "{server}/v1", "apiKey": "none"},
                        "models": {
                            MODEL: {
                                "reasoning": True,
                                "tool_call": True,
                                "limit": {"context": 200_000, "output": 4096},
                            }
                        },
                    }
                },
            },
            indent=2,
        )
    },
)
# It waits for a command's output a fixed time after the command's end: on a loaded machine that is
# "Output: (empty)" now and then, and the model that is played asks for it once more.
QWEN_CODE = Agent(
    package="@qwen-code/qwen-code",
    program=".bin/qwen",
    ask=("--auth-type", "openai", "--yolo", QUESTION),
    go_on=("--auth-type", "openai", "--yolo", "--continue", AGAIN),
    tool="run_shell_command",
    arguments=_command,
    environment={
        "OPENAI_BASE_URL": "{server}/v1",
        "OPENAI_API_KEY": "none",
        "OPENAI_MODEL": MODEL,
    },
)
# The program lies in the platform's package. By default it leaves a daemon behind that outlives the
# session, and only its page in a terminal goes on with one (`--id`).
CLINE = Agent(
    package="cline",
    program="@cline/cli-linux-x64/bin/cline",
    ask=(QUESTION,),
    go_on=(),
    tool="run_commands",
    arguments=lambda file: {"commands": [f"cat {file}"]},
    environment={"CLINE_SESSION_BACKEND_MODE": "local"},
    files={
        ".cline/data/settings/providers.json": json.dumps(
            {
                "version": 1,
                "lastUsedProvider": "openai-compatible",
                "providers": {
                    "openai-compatible": {
                        "settings": {
                            "provider": "openai-compatible",
                            "apiKey": "none",
                            "model": MODEL,
                            "baseUrl": "{server}/v1",
                        },
                        "updatedAt": "2026-11-29T00:00:00.000Z",
                        "tokenSource": "manual",
                    }
                },
            },
            indent=2,
        )
    },
)
AGENTS = {
    "codex": CODEX,
    "pi": PI,
    "claude-code": CLAUDE_CODE,
    "opencode": OPENCODE,
    "qwen-code": QWEN_CODE,
    "cline": CLINE,
}
