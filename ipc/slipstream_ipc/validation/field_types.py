"""Says in words which values a type allows, and what is wrong with a value that msgspec refuses.

Python, HTTP, the command line and settings all report a wrong type in these words.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec
from msgspec import UNSET, inspect

from slipstream_ipc.errors import BadRequest, MissingField, Summary, UnknownField

_MAX_NAMED = 8  # fields of a struct that its description names
# types of a message's parts, in the APIs that clients know
_NOT_TEXT = re.compile(r"(?:input_)?(?:audio|document|file|image|video)(?:_url|_file|_pil)?")
_ERROR = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$\.?([^`]*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_GOT = re.compile(r"got `(\w+)`")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
# a decimal number with nothing on one side of its point, which JSON does not allow
_HALF_A_NUMBER = re.compile(r"([+-]?)(?:([0-9]+)\.|\.([0-9]+))((?:[eE][+-]?[0-9]+)?)")
_KINDS = {  # msgspec's names of types
    "array": "a list",
    "bool": "a boolean",
    "float": "a number",
    "int": "an integer",
    "null": "None",
    "object": "a mapping",
    "str": "a string",
}
_MANY: dict[type[inspect.Type], str] = {
    inspect.DictType: "mappings",
    inspect.FloatType: "numbers",
    inspect.IntType: "integers",
    inspect.StrType: "strings",
    inspect.StructType: "mappings",
}
_type_info = cache(inspect.type_info)


def values_of(info: inspect.Type, *, in_python: bool = True) -> str:
    """A type's values in words: "an integer >= 1, or None", "a list of strings".

    in_python: False for a command line, where no option is None and booleans are lower-case.
    """
    match info:
        case inspect.Metadata(type=inner):
            return values_of(inner, in_python=in_python)
        case inspect.UnionType(types=types):
            kinds = [one for one in types if not isinstance(one, inspect.NoneType)]
            words = " or ".join([values_of(one, in_python=in_python) for one in kinds])
            return f"{words}, or None" if in_python and len(kinds) < len(types) else words
        case inspect.LiteralType(values=values):
            names = ", ".join([str(value) for value in values])
            return f"one of {names}" if len(values) > 1 else names
        case inspect.IntType():
            return "an integer" + _bounds(info)
        case inspect.FloatType():
            return "a number" + _bounds(info)
        case inspect.BoolType():
            return "True or False" if in_python else "true or false"
        case inspect.NoneType():
            return "None"
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            most = f"at most {info.max_length} " if info.max_length is not None else ""
            return f"a list of {most}{_items(item)}"
        case inspect.DictType(key_type=key, value_type=value):
            is_plain = isinstance(key, inspect.StrType)
            return "a mapping" if is_plain else f"a mapping of {_items(key)} to {_items(value)}"
        case inspect.StructType(fields=fields):
            names = ", ".join([field.encode_name for field in fields])
            return f"a mapping with {names}" if len(fields) <= _MAX_NAMED else "a mapping"
        case inspect.AnyType():
            return "any value"
        case _:
            return "a string"


def of_text(given: Any, kind: Any) -> Any:
    """The value of a type that a text stands for, as people write it: `.5` and `5.` are numbers.
    Other values than texts as they are.

    Raises: msgspec.ValidationError.
    """
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError:
        half = _HALF_A_NUMBER.fullmatch(given) if isinstance(given, str) else None
        if half is None:
            raise
        sign, whole, fraction, exponent = half.groups()
        written = f"{sign.strip('+')}{whole or 0}.{fraction or 0}{exponent}"
        return msgspec.convert(written, kind, strict=False)


def field_error(
    error: msgspec.ValidationError, kind: Any, given: object = UNSET, *, where: str = ""
) -> BadRequest:
    """The error for a value that msgspec does not convert to `kind`.

    given: the whole value as builtins, whose wrong part is quoted; without it, that part's type is
    named. where: the whole value's name, to which the part's is appended.
    """
    found = _ERROR.fullmatch(str(error))
    assert found is not None  # any text matches
    what, path = found.group(1), (found.group(2) or "").partition("[...]")[0]
    info, part = _type_info(kind), given
    for name, index in _STEP.findall(path):
        info = _step(info, name)
        try:
            part = part[int(index) if index else name]  # type: ignore[index]
        except (LookupError, TypeError):
            part = UNSET
    field = _joined(where, path)
    for pattern, refused in ((_UNKNOWN, UnknownField), (_MISSING, MissingField)):
        if named := pattern.fullmatch(what):
            allowed = {each.encode_name: values_of(each.type) for each in _fields(info)}
            name = named.group(1)
            return refused(f"{field}.{name}" if field else name, name, allowed)
    if part is UNSET:
        got = _GOT.search(what)
        part = Summary(_KINDS.get(got.group(1), "another type") if got else "another value")
    only = values_of(info)
    if isinstance(part, str) and _NOT_TEXT.fullmatch(part) and field.endswith("type"):
        only += "; the model is served as text"
    return BadRequest(field, part, only)


def _joined(where: str, name: str) -> str:
    return f"{where}.{name}" if where and name and name[0] != "[" else where + name


def _step(info: inspect.Type, name: str) -> inspect.Type:
    """The type of a field of a mapping, or of an array's items where `name` is empty; AnyType for
    what is not there.
    """
    match info:
        case inspect.Metadata(type=inner):
            return _step(inner, name)
        case inspect.UnionType(types=types):
            found = [_step(each, name) for each in types]
            return next((each for each in found if each != inspect.AnyType()), inspect.AnyType())
        case inspect.StructType(tag_field=tag_field, tag=tag) if name and name == tag_field:
            return inspect.LiteralType((tag,))
        case inspect.StructType(fields=fields):
            types = tuple(each.type for each in fields if each.encode_name == name)
            return types[0] if types else inspect.AnyType()
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item) if not name:
            return item
        case _:
            return inspect.AnyType()


def _fields(info: inspect.Type) -> tuple[inspect.Field, ...]:
    match info:
        case inspect.Metadata(type=inner):
            return _fields(inner)
        case inspect.UnionType(types=types):
            return tuple(field for each in types for field in _fields(each))
        case inspect.StructType(fields=fields):
            return fields
        case _:
            return ()


def _items(info: inspect.Type) -> str:
    bare = info
    while isinstance(bare, inspect.Metadata):
        bare = bare.type
    bounds = _bounds(bare) if isinstance(bare, inspect.IntType | inspect.FloatType) else ""
    return _MANY.get(type(bare), "values") + bounds


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    bounds = (("> ", info.gt), (">= ", info.ge), ("< ", info.lt), ("<= ", info.le))
    shown = " and ".join([f"{sign}{bound:g}" for sign, bound in bounds if bound is not None])
    return f" {shown}" if shown else ""
