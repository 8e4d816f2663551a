"""What a request may ask its answer to look like, as far as that can be seen without a grammar."""

from __future__ import annotations

import pytest

from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import SamplingParams, StructuredOutputs
from slipstream_ipc.validation.sampling_params import check_params
from slipstream_ipc.validation.structured_output import (
    MAX_CHOICE_BYTES,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
    check_ending,
    json_as_text,
)

GOOD = [
    StructuredOutputs(json='{"type": "integer"}'),
    StructuredOutputs(json={"type": "integer"}),
    StructuredOutputs(regex="a" * MAX_REGEX_BYTES),
    StructuredOutputs(grammar="g" * MAX_GRAMMAR_BYTES),
    StructuredOutputs(choice=("a", "b")),
    StructuredOutputs(choice=("x",) * MAX_CHOICES),
    StructuredOutputs(json_object=True),
    StructuredOutputs(regex="a", json_object=False),
    StructuredOutputs(json="{}", disable_any_whitespace=True),
    StructuredOutputs(json_object=True, disable_any_whitespace=True),
]
BAD = [
    ("structured_outputs", StructuredOutputs()),
    ("structured_outputs", StructuredOutputs(json_object=False)),
    ("structured_outputs", StructuredOutputs(json_object=True, regex="a")),
    ("structured_outputs", StructuredOutputs(regex="a", choice=("a",))),
    ("structured_outputs", StructuredOutputs(disable_any_whitespace=True)),
    (
        "structured_outputs.disable_any_whitespace",
        StructuredOutputs(regex="a", disable_any_whitespace=True),
    ),
    ("structured_outputs.json", StructuredOutputs(json="x" * (MAX_SCHEMA_BYTES + 1))),
    ("structured_outputs.json", StructuredOutputs(json={"x": "é" * (MAX_SCHEMA_BYTES // 2)})),
    ("structured_outputs.json", StructuredOutputs(json={"x": object()})),
    ("structured_outputs.json", StructuredOutputs(json={"x": "\ud800"})),
    ("structured_outputs.regex", StructuredOutputs(regex="\ud800")),
    ("structured_outputs.regex", StructuredOutputs(regex="é" * (MAX_REGEX_BYTES // 2 + 1))),
    ("structured_outputs.grammar", StructuredOutputs(grammar="g" * (MAX_GRAMMAR_BYTES + 1))),
    ("structured_outputs.choice", StructuredOutputs(choice=())),
    ("structured_outputs.choice", StructuredOutputs(choice=("a", ""))),
    ("structured_outputs.choice", StructuredOutputs(choice=("x",) * (MAX_CHOICES + 1))),
    ("structured_outputs.choice", StructuredOutputs(choice=("x" * (MAX_CHOICE_BYTES + 1),))),
]


@pytest.mark.parametrize("outputs", GOOD)
def test_what_is_allowed(outputs: StructuredOutputs) -> None:
    check_params(SamplingParams(structured_outputs=outputs))


@pytest.mark.parametrize(("field", "outputs"), BAD)
def test_what_is_refused_names_its_field(field: str, outputs: StructuredOutputs) -> None:
    with pytest.raises(BadRequest) as caught:
        check_params(SamplingParams(structured_outputs=outputs))
    assert caught.value.field == field


def test_a_schema_too_deep_to_be_written_is_refused() -> None:
    schema: dict[str, object] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(BadRequest) as caught:
        check_params(SamplingParams(structured_outputs=StructuredOutputs(json=schema)))
    assert caught.value.field == "structured_outputs.json"
    while schema:  # lest the interpreter free all of it within one another
        schema = schema["items"]  # type: ignore[assignment]


def test_the_grammar_alone_says_when_an_answer_may_end() -> None:
    outputs = StructuredOutputs(regex="a")
    with pytest.raises(BadRequest) as caught:
        check_params(SamplingParams(structured_outputs=outputs, min_tokens=1))
    assert caught.value.field == "min_tokens"


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_an_answer_in_a_grammar_needs_an_end(ignore_eos: bool) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a"), ignore_eos=ignore_eos)
    with pytest.raises(BadRequest, match="stop_token_ids") as caught:
        check_ending(params, ())
    assert caught.value.field == "structured_outputs"
    check_ending(params, (3,))
    check_ending(SamplingParams(ignore_eos=ignore_eos), ())


def test_a_schema_travels_as_text() -> None:
    as_text = json_as_text(StructuredOutputs(json={"type": "string", "enum": ["é"]}))
    assert as_text == StructuredOutputs(json='{"type":"string","enum":["é"]}')
    assert json_as_text(as_text) is as_text
    other = StructuredOutputs(regex="a")
    assert json_as_text(other) is other
