"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's shapes.

- A change is answered when requests find it: at once here, and at other fronts and clients with
  what they are told next.
- With API keys, only those that `lora_key_file` names may change adapters.
"""

from __future__ import annotations

from collections.abc import Callable

from slipstream.client.connection.loop_io import LoopIO
from slipstream.client.connection.queries import new_change
from slipstream.http.api_errors import ApiError, bad_field
from slipstream.http.auth import ApiKeys
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.openai.body_decoder import BodyDecoder
from slipstream.http.openai.request_bodies import LoadLoraRequest, UnloadLoraRequest
from slipstream.http.planning.served_model import respond_when_done, served_models
from slipstream.http.response_encoding import Response
from slipstream_ipc.messages import AdapterChanged, ChangeAdapter, ChangeFault

_TEXT = b"text/plain; charset=utf-8"
_STATUS: dict[ChangeFault, int] = {"": 400, "missing": 404, "forbidden": 403, "no_room": 507}
_load_decoder = BodyDecoder(LoadLoraRequest)
_unload_decoder = BodyDecoder(UnloadLoraRequest)


def load_adapter(io: LoopIO, keys: ApiKeys, request: HttpRequest, exchange: Exchange) -> None:
    """POST /v1/load_lora_adapter. Raises: ApiError, BadRequestError."""
    _check_key(keys, request)
    body = _load_decoder.decode(request.body)
    if not body.lora_name or not body.lora_path:
        param = "lora_path" if body.lora_name else "lora_name"
        raise bad_field(param, "lora_name and lora_path are needed")
    change = new_change(body.lora_name, body.lora_path, load_inplace=body.load_inplace)
    _change(io, change, exchange, "added")


def unload_adapter(io: LoopIO, keys: ApiKeys, request: HttpRequest, exchange: Exchange) -> None:
    """POST /v1/unload_lora_adapter. Raises: ApiError, BadRequestError."""
    _check_key(keys, request)
    body = _unload_decoder.decode(request.body)
    if not body.lora_name:
        raise bad_field("lora_name", "the name of an adapter is needed")
    _change(io, new_change(body.lora_name), exchange, "removed")


def _check_key(keys: ApiKeys, request: HttpRequest) -> None:
    """Raises ApiError for a key that may not change adapters."""
    if not keys.may_change_adapters(keys.tenant(request.headers)):
        what = "this API key may not change adapters: --lora-key-file FILE names those that may"
        raise ApiError(403, what, code="forbidden")


def _change(io: LoopIO, change: ChangeAdapter, exchange: Exchange, what: str) -> None:
    served_models(io)
    respond_when_done(io.ask(change), exchange, _response_of(change.name, what), {})


def _response_of(name: str, what: str) -> Callable[[AdapterChanged], Response]:
    def response_of(changed: AdapterChanged) -> Response:
        """Raises: ApiError."""
        fault = changed.fault
        if fault is not None and fault.code == "overloaded" and not changed.why:
            raise ApiError(503, fault.message, code="overloaded")
        if fault is not None:
            raise ApiError(_STATUS[changed.why], fault.message, param=fault.field)
        said = f"Success: LoRA adapter '{name}' {what} successfully."
        if changed.num_streams:
            said += f" {changed.num_streams} running requests go on with what it was."
        if changed.warning:
            said += f" Warning: {changed.warning}."
        return Response(200, said.encode(), content_type=_TEXT)

    return response_of
