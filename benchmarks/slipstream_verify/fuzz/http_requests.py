"""HTTP requests that ask for much, or for what is nothing: each follows from a seed and its number.

A request is a body of one of the APIs, with one or two of its parts as large, deep or many as they
may be or beyond, and then perhaps damaged: cut, changed bytes, a wrong value somewhere. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from msgspec import Struct

from slipstream_verify.fuzz.damaged_images import damaged_image, data_url
from slipstream_verify.fuzz.mutation import flipped, truncated

_WORDS = ("snow", "a", "é", "\U0001f600", "\n", '"', "\\", "</think>", "\ud800", "\0", "start: x")
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**31, 2**53 + 1, 2**64, -(2**63), 1e308, "", "x", "auto"),
    *([], [[]], [None], {}, {"": None}, {"type": "text"}, {"type": "function"}, ["x"] * 300),
)
_PAGES = ("limit=1", "limit=0", "limit=x", "after_id=%00", "before_id=m&limit=3", "limit=9" * 40)
_FIELDS = (
    *("temperature", "top_p", "seed", "stop", "n", "logit_bias", "response_format", "stream"),
    *("structured_outputs", "prompt_logprobs", "tool_choice", "stream_options", "user", "metadata"),
)
_DEPTHS = (3, 40, 500, 20_000)
_SIZES = (1, 3, 100, 3000)


class HttpFuzzRequest(Struct, frozen=True):
    """A request. kinds: what is unusual about it. is_streamed: its answer may be a stream."""

    method: str
    path: str
    body: bytes
    kinds: tuple[str, ...]
    is_streamed: bool = False


def http_request(seed: int, number: int, response_ids: Sequence[str] = ()) -> HttpFuzzRequest:
    """The request of this number. response_ids: of responses that a server has given."""
    random = Random(f"{seed} {number}")  # noqa: S311  (attacks are to be repeated)
    if random.random() < 0.15:
        return _without_body(random, response_ids)
    path = random.choice(tuple(_BASES))
    body = _BASES[path](random)
    drawn = random.sample(sorted(_KINDS), random.choice((0, 1, 1, 2)))
    kinds = [kind for kind in drawn if _KINDS[kind](random, path, body, response_ids)]
    if random.random() < 0.2:
        body[random.choice((*_FIELDS, *body))] = random.choice(_ODD)
        kinds.append("odd")
    try:
        content = json.dumps(body, ensure_ascii=random.random() < 0.5).encode()
    except UnicodeEncodeError:  # half of a character
        content = json.dumps(body).encode()
    if random.random() < 0.1:
        content = random.choice((flipped, truncated))(random, content)
        kinds.append("damaged")
    return HttpFuzzRequest("POST", path, content, tuple(kinds), body.get("stream") is True)


def _without_body(random: Random, response_ids: Sequence[str]) -> HttpFuzzRequest:
    some_id = random.choice([*response_ids, "resp_" + "0" * 32, "resp_x", "%ff", "x" * 3000])
    path = random.choice(
        (
            "/metrics",
            "/metrics?replicas=all",
            f"/v1/models?{random.choice(_PAGES)}",
            "/v1/models/none",
            f"/v1/responses/{some_id}",
            f"/v1/responses/{some_id}/input_items?{random.choice(_PAGES)}",
            f"/v1/streams/{some_id}",
            "/health",
            "/live",
            "/openapi.json",
        )
    )
    method = "DELETE" if "responses" in path and random.random() < 0.1 else "GET"
    kinds = ("paging" if "?" in path else "plain",)
    return HttpFuzzRequest(method, path, b"", kinds, path.startswith("/v1/streams/"))


def _text(random: Random) -> str:
    return random.choice(_WORDS) * random.choice((1, 1, 1, 50, 5000))


def _common(random: Random) -> dict[str, Any]:
    return {"max_tokens": random.choice((1, 2, 20)), "stream": random.random() < 0.4}


def _chat(random: Random) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": _text(random)}], **_common(random)}


def _completion(random: Random) -> dict[str, Any]:
    prompt: Any = random.choice((_text(random), [1, 2, 3], ["a", "b"], [[1], [2]]))
    return {"prompt": prompt, **_common(random)}


def _response(random: Random) -> dict[str, Any]:
    common = _common(random)
    return {"input": _text(random), "max_output_tokens": common.pop("max_tokens"), **common}


def _input_tokens(random: Random) -> dict[str, Any]:
    return {"input": _text(random)}


def _count(random: Random) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": _text(random)}]}


def _message(random: Random) -> dict[str, Any]:
    return {**_count(random), **_common(random)}


def _tokenize(random: Random) -> dict[str, Any]:
    return {"prompt": _text(random)}


def _detokenize(random: Random) -> dict[str, Any]:
    return {"tokens": [random.randrange(5000) for _ in range(random.choice(_SIZES))]}


def _generate(random: Random) -> dict[str, Any]:
    return {"text": _text(random), "sampling_params": {"max_tokens": 3}}


def _inputs(random: Random) -> dict[str, Any]:
    return {"input": random.choice((_text(random), [1, 2, 3], [_text(random)] * 3, []))}


def _pairs(random: Random) -> dict[str, Any]:
    several = [_text(random)] * random.choice((0, 1, 3, 2049))
    return {"text_1": _text(random), "text_2": random.choice((_text(random), several))}


def _documents(random: Random) -> dict[str, Any]:
    documents = [_text(random), {"text": _text(random)}, {"content": [_text(random)]}]
    return {"query": _text(random), "documents": documents, "top_n": random.choice((0, 2, -1))}


_BASES: dict[str, Callable[[Random], dict[str, Any]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/responses/input_tokens": _input_tokens,
    "/v1/messages": _message,
    "/v1/messages/count_tokens": _count,
    "/v1/embeddings": _inputs,
    "/classify": _inputs,
    "/score": _pairs,
    "/rerank": _documents,
    "/tokenize": _tokenize,
    "/detokenize": _detokenize,
    "/generate": _generate,
}


def _turns(random: Random, path: str, body: dict[str, Any], _ids: Sequence[str]) -> bool:
    num = random.choice((2, 100, 3000, 16_384, 17_000))
    field = "input" if "responses" in path else "messages"
    if field not in body:
        return False
    roles = random.choice((("user",), ("user", "assistant"), ("system", "user"), ("tool",)))
    body[field] = [{"role": roles[at % len(roles)], "content": "x"} for at in range(num)]
    return True


def _parts(random: Random, path: str, body: dict[str, Any], _ids: Sequence[str]) -> bool:
    part = random.choice(
        (
            {"type": "text", "text": "x"},
            {"type": "input_text", "text": "x"},
            {"type": "tool_result", "tool_use_id": "a", "content": "x"},
            {"type": "image_url", "image_url": {"url": "data:,"}},
            {"type": "image_url", "image_url": {"url": data_url(damaged_image(random), random)}},
            {"type": "input_image", "image_url": data_url(damaged_image(random), random)},
            {"type": "none", "x": 1},
        )
    )
    field = "input" if "responses" in path else "messages"
    if field not in body:
        return False
    parts = [part] * random.choice((1, 100, 20_000))
    body[field] = [{"role": "user", "content": parts}]
    return True


def _items(random: Random, path: str, body: dict[str, Any], _ids: Sequence[str]) -> bool:
    if "responses" not in path:
        return False
    item = random.choice(
        (
            {"type": "reasoning"},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"},
            {"type": "function_call_output", "call_id": "a", "output": "x"},
            {"type": "web_search_call", "id": "w"},
            {"type": "message", "role": "user", "content": "x"},
        )
    )
    body["input"] = [item] * random.choice((1, 100, 20_000))
    return True


def _references(random: Random, path: str, body: dict[str, Any], ids: Sequence[str]) -> bool:
    if "responses" not in path or not ids:
        return False
    if random.random() < 0.5:
        body["previous_response_id"] = random.choice(ids)
        return True
    named = [each.replace("resp_", "msg_") + "0000" for each in ids]
    refs = [{"type": "item_reference", "id": random.choice(named)} for _ in range(40)]
    body["input"] = [*refs, {"role": "user", "content": "x"}]
    return True


def _schema(random: Random) -> dict[str, Any]:
    depth = random.choice(_DEPTHS[:3])
    if random.random() < 0.5:
        return {"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}] * depth}}}
    found: dict[str, Any] = {"type": "string"}
    for _ in range(min(depth, 400)):
        found = {"type": "object", "properties": {"p": found}, "required": ["p"]}
    return found


def _tools(random: Random, path: str, body: dict[str, Any], _ids: Sequence[str]) -> bool:
    if not any(each in path for each in ("chat", "responses", "messages")):
        return False
    schema, num = _schema(random), random.choice((1, 38, 600))
    functions = [{"name": f"f{at}", "parameters": schema} for at in range(num)]
    if "chat" in path:
        body["tools"] = [{"type": "function", "function": each} for each in functions]
    elif "responses" in path:
        body["tools"] = [{"type": "function", **each} for each in functions]
    else:
        body["tools"] = [{"name": each["name"], "input_schema": schema} for each in functions]
    if random.random() < 0.3:
        body["tool_choice"] = random.choice(("required", "auto", {"type": "any"}, "none"))
    return True


def _outputs(random: Random, path: str, body: dict[str, Any], _ids: Sequence[str]) -> bool:
    if "chat" not in path and path != "/v1/completions":
        return False
    form = random.choice(
        (
            {"json": _schema(random)},
            {"regex": "(a|b)*" * random.choice(_SIZES[:3])},
            {"regex": "(a{1,500}){1,500}"},
            {"grammar": 'start: "a" start | "b"'},
            {"grammar": "start: " + "(" * random.choice(_DEPTHS[:3]) + '"a"'},
            {"choice": ["x" * 50] * random.choice(_SIZES)},
        )
    )
    body["structured_outputs"] = form
    return True


def _logprobs(random: Random, path: str, body: dict[str, Any], _ids: Sequence[str]) -> bool:
    num = random.choice((0, 5, 20, 21, -1))
    if "chat" in path:
        body.update(logprobs=True, top_logprobs=num)
    elif path == "/v1/completions":
        body.update(logprobs=num, echo=random.random() < 0.3)
    elif path == "/v1/responses":
        body.update(top_logprobs=num, include=["message.output_text.logprobs"])
    else:
        return False
    return True


def _answers(random: Random, path: str, body: dict[str, Any], _ids: Sequence[str]) -> bool:
    if "chat" not in path and path != "/v1/completions":
        return False
    body["n"] = random.choice((0, 2, 16, 129))
    return True


def _deep(random: Random, _path: str, body: dict[str, Any], _ids: Sequence[str]) -> bool:
    found: Any = "x"
    for _ in range(min(random.choice(_DEPTHS), 600)):
        found = [found] if random.random() < 0.5 else {"x": found}
    body[random.choice((*_FIELDS, "chat_template_kwargs", "unknown"))] = found
    return True


def _unknown(random: Random, _path: str, body: dict[str, Any], _ids: Sequence[str]) -> bool:
    body.update({f"unknown_{at}": at for at in range(random.choice(_SIZES))})
    return True


_Change = Callable[[Random, str, dict[str, Any], Sequence[str]], bool]
_KINDS: dict[str, _Change] = {
    "answers": _answers,
    "deep": _deep,
    "items": _items,
    "logprobs": _logprobs,
    "outputs": _outputs,
    "parts": _parts,
    "references": _references,
    "tools": _tools,
    "turns": _turns,
    "unknown": _unknown,
}
HTTP_KINDS = (*_KINDS, "odd", "damaged", "paging", "plain")
