"""openai's client: responses, with their items sent back, and with the server's memory of them."""

from __future__ import annotations

from typing import Any

from openai import OpenAI
from scenario import KEY, MODEL, QUESTION, WEATHER, base_url, report, run

TOOLS: Any = [{"type": "function", **WEATHER, "strict": True}]


def loop(client: OpenAI, is_stream: bool, is_kept: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "store": is_kept}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    answers: list[Any] = []
    while True:
        if is_stream:
            with client.responses.stream(input=items, **options) as stream:
                pieces = [event.delta for event in stream if event.type.endswith("text.delta")]
                answer: Any = stream.get_final_response()
            assert "".join(pieces).endswith(answer.output_text)
        else:
            answer = client.responses.create(input=items, **options)
        answers.append(answer)
        results = [
            {
                "type": "function_call_output",
                "call_id": it.call_id,
                "output": run(it.arguments),
            }
            for it in answer.output
            if it.type == "function_call"
        ]
        if not results:
            break
        if is_kept:
            options["previous_response_id"] = answer.id
            items = results
        else:
            items += [*answer.output, *results]
    output = [it for answer in answers for it in answer.output]
    return {
        "calls": [(it.name, it.arguments) for it in output if it.type == "function_call"],
        "reasoning": [it.content[0].text for it in output if it.type == "reasoning"],
        "text": answers[-1].output_text,
        "finish_reasons": [it.status for it in answers],
        "usage": [(it.usage.input_tokens, it.usage.output_tokens) for it in answers],
    }


with OpenAI(base_url=f"{base_url()}/v1", api_key=KEY, max_retries=0) as client:
    report(
        whole=loop(client, False, False),
        streamed=loop(client, True, False),
        whole_kept=loop(client, False, True),
        streamed_kept=loop(client, True, True),
    )
