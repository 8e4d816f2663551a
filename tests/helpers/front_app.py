"""A front's app over a connection that a test provides."""

from __future__ import annotations

from typing import Any

from slipstream.http.app import App
from slipstream.http.auth import ApiKeys
from slipstream.http.config import Limits
from slipstream.http.endpoints.model_endpoints import ModelEndpoints
from slipstream.http.logprobs.vocabulary import TextsByModel


def app_over(io: Any, tokenizer: str = "nowhere", **options: Any) -> App:
    """Without keys. tokenizer: a folder. options: see `App`."""
    keys = ApiKeys(())
    endpoints = ModelEndpoints(io, keys, TextsByModel(lambda _: tokenizer), Limits())
    return App(io, keys, endpoints, **options)
