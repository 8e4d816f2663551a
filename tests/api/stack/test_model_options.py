"""What a user changes of a model reaches the processes, or is refused with the option's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import BadRequestError
from slipstream.stack.plan.models.model_options import core_model_options, worker_model_options
from slipstream.stack.settings import settings_from


def test_what_is_not_given_changes_nothing() -> None:
    settings = settings_from({})
    assert core_model_options(settings) == {
        "hf_overrides": {},
        "generation_config": "auto",
        "override_generation_config": {},
    }
    assert worker_model_options(settings) == {
        "chat_template": None,
        "default_chat_template_kwargs": {},
    }


@pytest.mark.parametrize("from_text", [True, False])
def test_json_of_a_command_line_and_objects_of_python(from_text: bool) -> None:
    objects: dict[str, dict[str, Any]] = {
        "hf_overrides": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        "override_generation_config": {"temperature": 0.5, "top_k": 20},
        "default_chat_template_kwargs": {"enable_thinking": False},
    }
    texts = {
        "hf_overrides": '{"rope_scaling": {"type": "yarn", "factor": 4.0}}',
        "override_generation_config": '{"temperature": 0.5, "top_k": 20}',
        "default_chat_template_kwargs": '{"enable_thinking": false}',
    }
    settings = settings_from(texts if from_text else objects, from_text=from_text)
    told = core_model_options(settings) | worker_model_options(settings)
    assert objects.items() <= told.items()


def test_a_template_in_a_file_or_as_it_is(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    file = tmp_path / "template.jinja"
    file.write_text(template)
    for given in (template, str(file)):
        settings = settings_from({"chat_template": given})
        assert worker_model_options(settings)["chat_template"] == template


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("hf_overrides", "{"),
        ("hf_overrides", "[]"),
        ("override_generation_config", '{"max_new_tokens": 3}'),
        ("override_generation_config", '{"top_k": 0.5}'),
        ("override_generation_config", '{"temperature": true}'),
        ("default_chat_template_kwargs", '{"tools": []}'),
        ("default_chat_template_kwargs", "enable_thinking"),
        ("generation_config", "/nowhere"),
        ("chat_template", "/nowhere/template.jinja"),
    ],
)
def test_what_is_refused_is_named(option: str, value: str) -> None:
    settings = settings_from({option: value}, from_text=True)
    is_template = "template" in option
    with pytest.raises(BadRequestError) as refused:
        (worker_model_options if is_template else core_model_options)(settings)
    assert str(refused.value).startswith(f"{option}: got ")
