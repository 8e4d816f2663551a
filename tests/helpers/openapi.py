"""The OpenAPI document, and schemas in it."""

from __future__ import annotations

import json
from typing import Any

from slipstream.http.endpoints.openapi import document

DOCUMENT = json.loads(document())


def schema_of(path: str, part: str) -> dict[str, Any]:
    operation = DOCUMENT["paths"][path]["post"]
    if part == "body":
        found = operation["requestBody"]["content"]["application/json"]
    else:
        found = operation["responses"]["200"]["content"][part]
    schema: dict[str, Any] = found["schema"]
    return {**schema, "components": DOCUMENT["components"]}
