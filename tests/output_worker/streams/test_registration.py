"""What a submission becomes: the registration that every party works from."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import msgspec
import pytest
from msgspec import structs

from slipstream_ipc.columns import pack_u32, u32
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import (
    MAX_LORA_NAME_CHARS,
    MAX_LORAS,
    AdapterRef,
    Admit,
    AnswerOptions,
    AnswerSettings,
    Fault,
    ModelCard,
    OtherAnswer,
    ReasoningIds,
    RequestSpec,
    SamplingParams,
    StructuredOutputs,
    Submit,
)
from slipstream_ipc.transport.codec import encode_params
from slipstream_worker.clients.readers import accepted
from slipstream_worker.streams import registration
from slipstream_worker.streams.registration import Submission, answers_of, register
from slipstream_worker.streams.retention import request_bytes

CARD = ModelCard("m", "p", vocab_size=1000, max_model_len=64, eos_token_ids=(2,))
PROMPT = pack_u32([1, 5, 7])


def submission(**params: object) -> Submit:
    encoded = encode_params(SamplingParams(**params))  # type: ignore[arg-type]
    return Submit(1, bytes(16), encoded, token_ids=PROMPT)


def test_allowed_ids_are_registered_once_each() -> None:
    """However often a client lists one, it travels to the core and is kept there once."""
    for given, expected in (((5,) * 300_000, (5,)), ((9, 3, 9, 7), (3, 7, 9))):
        submit = submission(allowed_token_ids=given)
        spec = Submission(submit).spec_of(submit)
        admit = register(submit, PROMPT, b"c", CARD, spec=spec, fingerprint=b"")
        assert admit.spec.params.allowed_token_ids == expected


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        (None, None),
        (StructuredOutputs(json={}), "json"),
        (StructuredOutputs(json_object=True, disable_any_whitespace=True), "other"),
        (StructuredOutputs(choice=("a",)), "other"),
        (StructuredOutputs(grammar='start: "a"'), "grammar"),
    ],
)
def test_what_a_frame_has_to_know_of_structured_output(
    outputs: StructuredOutputs | None, expected: str | None
) -> None:
    found = Submission(submission(structured_outputs=outputs))
    assert found.structured_form == expected


def together(submit: Submit, num: int) -> Submit:
    others = tuple(OtherAnswer(i, bytes([i]) * 16, seed=5 + i) for i in range(1, num))
    return structs.replace(submit, others=others)


def test_answers_are_known_however_they_are_asked_for() -> None:
    """Together or alone, with the seed in the params or beside them, under another handle."""
    asked = together(submission(seed=5, logit_bias={3: 1.0}), 4)
    submission_of_all = Submission(asked)
    found = [submission_of_all.fingerprint(answer) for answer in answers_of(asked)]
    assert len(set(found)) == 4
    for index, (answer, fingerprint) in enumerate(zip(answers_of(asked), found, strict=True)):
        assert Submission(answer).fingerprint(answer) == fingerprint
        own = encode_params(SamplingParams(seed=5 + index, logit_bias={3: 1.0}))
        again = structs.replace(
            answer, handle=99, params=own, seed=None, was_accepted=True, output_ids=PROMPT
        )
        assert Submission(again).fingerprint(again) == fingerprint
        for other in ({"seed": 77}, {"token_ids": pack_u32([1])}, {"stream_id": b"o" * 16}):
            changed = structs.replace(again, **other)
            assert Submission(changed).fingerprint(changed) != fingerprint


def test_a_prompt_is_hashed_once_for_all_of_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes, blake2b = 0, hashlib.blake2b

    def counting(data: bytes, **options: Any) -> Any:
        nonlocal num_bytes
        num_bytes += len(data)
        return blake2b(data, **options)

    monkeypatch.setattr(registration.hashlib, "blake2b", counting)
    asked = together(Submit(0, bytes(16), encode_params(SamplingParams()), "x" * 2**20), 128)
    all_of_them = Submission(asked)
    assert len({all_of_them.fingerprint(answer) for answer in answers_of(asked)}) == 128
    assert num_bytes < 1.1 * 2**20


def test_whom_a_stream_is_for_is_registered_and_part_of_no_fingerprint() -> None:
    submit = submission()
    claimed = structs.replace(submit, tenant=b"t")
    assert len({Submission(one).fingerprint(one) for one in (submit, claimed)}) == 1
    for one, tenant in ((submit, b"c"), (claimed, b"t")):
        spec = Submission(one, b"c").spec_of(one)
        admit = register(one, PROMPT, b"c", CARD, spec=spec, fingerprint=b"")
        assert admit.spec.tenant == tenant


def test_tenants_that_share_no_prefixes_have_roots_of_their_own() -> None:
    """A client that names no tenant shares them with all others of its kind."""

    def root(client: bytes, tenant: bytes, salt: str, *, shares: bool) -> bytes:
        one = structs.replace(submission(), tenant=tenant, cache_salt=salt)
        spec = Submission(one, client).spec_of(one)
        admit = register(
            *(one, PROMPT, client, CARD), spec=spec, fingerprint=b"", shares_prefixes=shares
        )
        return admit.derived.prefix_root

    def roots(*, shares: bool) -> set[bytes]:
        return {
            root(client, tenant, salt, shares=shares)
            for client in (b"c", b"d")
            for tenant in (b"", b"a", b"b")
            for salt in ("", "x")
        }

    assert (len(roots(shares=True)), len(roots(shares=False))) == (2, 6)
    assert roots(shares=True) < roots(shares=False)  # of no tenant's


def test_a_stream_goes_on_with_the_adapter_that_it_began_with() -> None:
    adapters = (AdapterRef("sql", "/sql", b"new"), AdapterRef("tone", "/tone", b"tone"))
    card = structs.replace(CARD, adapters=adapters)

    def registered(**fields: Any) -> Admit:
        one = structs.replace(submission(), **{"adapter": "sql", **fields})
        spec = Submission(one).spec_of(one)
        return register(one, PROMPT, b"c", card, spec=spec, fingerprint=b"")

    begun: tuple[dict[str, Any], ...] = ({"output_ids": PROMPT}, {"num_tokens": 3})
    for progress, known, expected in (
        ({}, b"", b"new"),
        ({}, b"old", b"new"),  # whatever its client knew
        *((each, b"old", b"old") for each in begun),
        *((each, b"", b"new") for each in begun),
    ):
        admit = registered(adapter_digest=known, **progress)
        assert admit.spec.adapter_digest == expected
        assert accepted(7, admit).adapter_digest == expected
    with pytest.raises(BadRequest, match="got 'none', allowed: one of 'sql', 'tone'"):
        registered(adapter="none")
    # one that was accepted is a core's to know: streams keep what has lost its name
    gone = registered(adapter="none", adapter_digest=b"old", was_accepted=True)
    assert gone.spec.adapter_digest == b"old"


def test_an_error_that_names_the_adapters_fits_into_its_message() -> None:
    adapters = [AdapterRef(f"{at:0{MAX_LORA_NAME_CHARS}}", "/", b"x") for at in range(MAX_LORAS)]
    card = structs.replace(CARD, adapters=tuple(adapters))
    one = structs.replace(submission(), adapter="none")
    with pytest.raises(BadRequest) as caught:
        register(one, PROMPT, b"c", card, spec=Submission(one).spec_of(one), fingerprint=b"")
    fault = caught.value.fault
    assert fault.message.endswith(f"31' and {MAX_LORAS - 32} more")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fault), type=Fault) == fault


def test_how_an_answer_is_read_is_part_of_its_fingerprint() -> None:
    submit = submission()
    read = [
        structs.replace(submit, answer=options)
        for options in (None, AnswerOptions(), AnswerOptions(stop_scope="all"))
    ]
    assert len({Submission(one).fingerprint(one) for one in read}) == 3


def test_events_need_text() -> None:
    answer = AnswerSettings("qwen3+hermes", b"")
    for detokenize in (True, False):
        submit = submission(detokenize=detokenize)
        spec = Submission(submit).spec_of(submit)
        with pytest.raises(BadRequest) if not detokenize else contextlib.nullcontext():
            admit = register(submit, PROMPT, b"c", CARD, spec=spec, fingerprint=b"", answer=answer)
            assert admit.derived.answer == answer


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(BadRequest, match='"required"'):
        Submission(structs.replace(submission(), answer=AnswerOptions("some")))
    for allowed in ("auto", "none", "required", "function:f"):
        Submission(structs.replace(submission(), answer=AnswerOptions(allowed)))


@pytest.mark.parametrize("choice", ["required", "function:f"])
@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 1},
        {"structured_outputs": StructuredOutputs(regex="a")},
        {"detokenize": False},
    ],
)
def test_a_forced_call_alone_decides_the_form(choice: str, params: dict[str, Any]) -> None:
    submit = structs.replace(submission(**params), answer=AnswerOptions(choice))
    with pytest.raises(BadRequest, match="a forced call decides") as caught:
        Submission(submit)
    assert caught.value.field == "tool_choice"
    Submission(structs.replace(submit, answer=AnswerOptions()))


def test_the_grammar_of_a_forced_call_is_the_cores_alone() -> None:
    submit = structs.replace(submission(), answer=AnswerOptions("required"))
    found = Submission(submit)
    spec, fingerprint = found.spec_of(submit), found.fingerprint(submit)
    admit = register(
        submit,
        PROMPT,
        b"c",
        CARD,
        spec=spec,
        fingerprint=fingerprint,
        answer=AnswerSettings("none+hermes", b""),
        call_grammar='start: "x"',
    )
    assert admit.spec.params.structured_outputs == StructuredOutputs(grammar='start: "x"')
    assert spec.params.structured_outputs is None
    with pytest.raises(BadRequest, match="that ends the answer"):
        register(
            submit,
            PROMPT,
            b"c",
            CARD,
            spec=structs.replace(spec, params=structs.replace(spec.params, ignore_eos=True)),
            fingerprint=fingerprint,
            answer=AnswerSettings("none+hermes", b"", options=AnswerOptions("required")),
            call_grammar='start: "x"',
        )
    assert admit.derived.fingerprint == fingerprint == Submission(submit).fingerprint(submit)


def test_the_grammar_of_a_free_answer_yields_to_the_request() -> None:
    """One of the whole answer, where strict functions are called by text."""
    submit = structs.replace(submission(), answer=AnswerOptions())

    def registered(**params: Any) -> StructuredOutputs | None:
        return register(
            submit,
            PROMPT,
            b"c",
            CARD,
            spec=RequestSpec(SamplingParams(**params)),
            fingerprint=b"",
            answer=AnswerSettings("none+llama3_json", b""),
            call_grammar='start: "x"',
        ).spec.params.structured_outputs

    assert registered() == StructuredOutputs(grammar='start: "x"')
    own = StructuredOutputs(regex="a")
    assert registered(structured_outputs=own) == own
    assert registered(ignore_eos=True) is None
    with pytest.raises(BadRequest, match="strict"):
        registered(min_tokens=1)


def test_formats_that_no_grammar_enforces_are_named() -> None:
    submit = structs.replace(submission(), answer=AnswerOptions())
    path = "tools.f.parameters.properties.input.pattern"

    def registered(grammar: str, *, is_for_formats: bool = True, **params: Any) -> Admit:
        return register(
            submit,
            PROMPT,
            b"c",
            CARD,
            spec=RequestSpec(SamplingParams(**params)),
            fingerprint=b"",
            answer=AnswerSettings("none+llama3_json", b""),
            call_grammar=grammar,
            formats=(path,),
            is_for_formats=is_for_formats,
        )

    assert registered('start: "x"').derived.left_out == ()
    for grammar, params in (
        ("", {}),
        ('start: "x"', {"ignore_eos": True}),
        ('start: "x"', {"structured_outputs": StructuredOutputs(regex="a")}),
        ('start: "x"', {"min_tokens": 1}),
    ):
        assert registered(grammar, **params).derived.left_out == (path,)
    with pytest.raises(BadRequest, match="strict"):
        registered('start: "x"', is_for_formats=False, min_tokens=1)


def test_a_target_of_reasoning_is_a_budget_where_one_can_be_kept() -> None:
    options = AnswerOptions(reasoning_target=7)
    submit = structs.replace(submission(), answer=options)

    def budget(reasoning: ReasoningIds | None, **params: Any) -> int | None:
        return register(
            submit,
            PROMPT,
            b"c",
            CARD,
            spec=RequestSpec(SamplingParams(**params)),
            fingerprint=b"",
            answer=AnswerSettings("qwen3+none", b"", options=options),
            reasoning=reasoning,
        ).spec.params.thinking_token_budget

    ids = ReasoningIds("start", begins=(5,), ends=(6,))
    assert budget(ids) == 7
    assert budget(ids, thinking_token_budget=3) == 3
    assert budget(ids, thinking_token_budget=-1) is None
    assert budget(ids, allowed_token_ids=(1, 2)) is None
    assert budget(None) is None


def test_a_prediction_is_registered_up_to_an_id_that_the_model_lacks() -> None:
    submit = submission()
    known, beyond = [5, 999, 6], [5, 999, 1000, 6]
    for ids, registered in ((known, known), (beyond, beyond[:2]), ([1000], []), ([], [])):
        spec = Submission(submit).spec_of(submit)
        admit = register(
            *(submit, PROMPT, b"c", CARD), spec=spec, fingerprint=b"", prediction_ids=pack_u32(ids)
        )
        assert u32(admit.derived.prediction_ids).tolist() == registered


def test_a_prediction_is_part_of_no_fingerprint_and_of_what_a_request_takes() -> None:
    submit = submission()
    predicted = structs.replace(submit, prediction="x" * 1000)
    assert Submission(predicted).fingerprint(predicted) == Submission(submit).fingerprint(submit)
    spec = Submission(submit).spec_of(submit)
    sizes = [
        request_bytes(
            register(
                *(submit, PROMPT, b"c", CARD),
                spec=spec,
                fingerprint=b"",
                prediction_ids=pack_u32([7] * num),
            )
        )
        for num in (0, 100)
    ]
    assert sizes[1] - sizes[0] == 400
