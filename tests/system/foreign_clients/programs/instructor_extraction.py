"""instructor: an object by a forced call, by a JSON schema, and streamed in parts."""

from __future__ import annotations

from typing import Any

import instructor
from openai import OpenAI
from pydantic import BaseModel, field_validator
from scenario import KEY, MODEL, base_url, report

QUESTION = "Extract the city and the number of days"
TOOLS, JSON = instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA
HOW = {TOOLS: "by a call", JSON: "as JSON"}


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int

    @field_validator("days")
    @classmethod
    def is_known(cls, value: int) -> int:
        """Ask again about the answer that is played first."""
        if value > 7:
            raise ValueError(f"{value} days are too many")
        return value


def extracted(client: OpenAI, mode: instructor.Mode) -> dict[str, Any]:
    reasons, usage = [], []
    patched = instructor.from_openai(client, mode=mode)

    def keep(answer: Any) -> None:
        reasons.append(answer.choices[0].finish_reason)
        usage.append((answer.usage.prompt_tokens, answer.usage.completion_tokens))

    patched.on("completion:response", keep)
    found = patched.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"{QUESTION} {HOW[mode]}."}],
        response_model=Weather,
        max_retries=2,
    )
    return {"object": found.model_dump(), "finish_reasons": reasons, "usage": usage}


def in_parts(client: OpenAI, mode: instructor.Mode) -> dict[str, Any]:
    patched = instructor.from_openai(client, mode=mode)
    parts = list(
        patched.create_partial(
            model=MODEL,
            messages=[{"role": "user", "content": f"{QUESTION} in parts {HOW[mode]}."}],
            response_model=Weather,
        )
    )
    assert len(parts) > 2
    return {"object": parts[-1].model_dump()}


with OpenAI(base_url=f"{base_url()}/v1", api_key=KEY, max_retries=0) as client:
    report(
        tools=extracted(client, TOOLS),
        json_schema=extracted(client, JSON),
        tools_streamed=in_parts(client, TOOLS),
        json_schema_streamed=in_parts(client, JSON),
    )
