"""The tables of vLLM's server options, and of its engine's, in docs/from-vllm.md:
`python -m tests.api.vllm_page` writes them anew.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import msgspec

from slipstream.cli.main import _parser
from slipstream.stack.plan.engine_options import DENIED, NAMED_HERE, OF_OUR_ENGINE
from slipstream.vllm_flags import Only, Renamed, Without, flag_named, flags, treatments

PAGE = Path(__file__).parents[2] / "docs" / "from-vllm.md"
BEGIN, END = "<!-- options: made of the table -->\n", "<!-- end of options -->\n"
ENGINE = "<!-- engine: made of the tables -->\n", "<!-- end of engine -->\n"
_NOTES = {
    "allowed_origins": "none unless given; names, or a list in JSON",
    "api_key": "`$SLIPSTREAM_API_KEY` for `$VLLM_API_KEY`",
    "attention_backend": "`auto`, `triton`, `torch`; vLLM's others are `auto`",
    "chat_template": "a file, or the template itself",
    "download_dir": "`$HF_HUB_CACHE` unless given",
    "dtype": "`half` and `float` too",
    "generation_config": "`vllm` leaves out sampling defaults, not ends",
    "gpu_memory_utilization": "less than 1; 0.9 unless given",
    "hf_overrides": "JSON; not `model_type`, of `architectures` a classifier alone",
    "host": "127.0.0.1 unless given",
    "language_model_only": "[vision models](exactness.md#multimodal-models)",
    "lora_modules": "[adapters](lora.md), on CPUs",
    "max_loras": "all may be in one step",
    "max_model_len": "`auto` and -1 are the model's own limit",
    "node_rank": "above 0 it is what vLLM calls headless",
    "nnodes": "with `--keys`: [several machines](deploying.md#one-model-over-several-machines)",
    "override_generation_config": "JSON; sampling defaults",
    "otlp_traces_endpoint": "OTLP over HTTP",
    "reasoning_parser": "known by the chat template",
    "revision": "of a hub id",
    "speculative_config": "JSON; [ngram, suffix, draft_model](speculation.md)",
    "served_model_name": "one with `*` at its end stands for all names that begin so",
    "tensor_parallel_size": "[by transformers' plans](serving.md#several-devices); not tried on "
    "cards",
    "tool_call_parser": "known by the chat template; `slipstream formats` lists the names",
}


def serve_options() -> dict[str, str]:
    """The options of `slipstream serve`, by name with underscores."""
    [subcommands] = [each for each in _parser()._actions if isinstance(each.choices, dict)]
    parser = subcommands.choices["serve"]
    parser.load()
    options = (option for action in parser._actions for option in action.option_strings)
    return {option[2:].replace("-", "_"): option for option in options if option[:2] == "--"}


def written(name: str) -> str:
    """An option with its short form."""
    flag = flag_named(name)
    assert flag is not None, name
    return " ".join(f"`{each}`" for each in (f"--{name.replace('_', '-')}", *flag.others))


def tables() -> str:
    """What stands between the marks."""
    lines = ["| vLLM | Slipstream | |", "|---|---|---|"]
    effects: dict[str, list[str]] = defaultdict(list)
    refusals: dict[str, list[str]] = defaultdict(list)
    for name in sorted({*flags(), *treatments()}):
        treatment = treatments().get(name)
        flag = flag_named(name)
        assert flag is not None
        if treatment is None or isinstance(treatment, Renamed):
            ours = "same" if treatment is None else f"`--{treatment.name.replace('_', '-')}`"
            note = "" if treatment is None else treatment.note
            lines.append(f"| {written(name)} | {ours} | {_NOTES.get(name, note)} |")
        elif isinstance(treatment, Without):
            effects[treatment.why].append(written(name))
        elif isinstance(treatment, Only):
            default = () if flag.default is None else (flag.default,)
            taken = ", ".join(dict.fromkeys(map(shown, (*default, *treatment.values))))
            if treatment.keys:
                taken = f"keys {', '.join(treatment.keys)}"
            refusals[treatment.why].append(f"{written(name)}{taken and f' ({taken})'}")
    lines += ["", "Taken without effect, with a line in the log:", "", "| because | |", "|---|---|"]
    lines += [f"| {why} | {', '.join(names)} |" for why, names in sorted(effects.items())]
    lines += ["", "Refused, but for the values in brackets:", "", "| because | |", "|---|---|"]
    lines += [f"| {why} | {', '.join(names)} |" for why, names in sorted(refusals.items())]
    return "\n".join(lines) + "\n"


def shown(value: object) -> str:
    """A value as it is given on a command line."""
    if isinstance(value, str):
        return value or '""'
    return "None" if value is None else msgspec.json.encode(value).decode()


def engine_tables() -> str:
    """What becomes of the fields of vLLM's `EngineArgs` with its engine."""
    set_by: dict[str, list[str]] = defaultdict(list)
    allowed: dict[str, list[str]] = defaultdict(list)
    for name, option in sorted(NAMED_HERE.items()):
        set_by[option].append(f"`{name}`")
    for name, why in sorted(DENIED.items()):
        allowed[why].append(f"`{name}`")
    lines = ["| set by | fields |", "|---|---|"]
    lines += [f"| {option} | {', '.join(names)} |" for option, names in sorted(set_by.items())]
    lines += ["| --engine-args, as JSON | the others |", ""]
    lines += ["| allowed | of the fields |", "|---|---|"]
    lines += [f"| {why} | {', '.join(names)} |" for why, names in sorted(allowed.items())]
    ours = ", ".join(f"`--{name.replace('_', '-')}`" for name in OF_OUR_ENGINE)
    return (
        "\n".join([*lines, "", f"Options that say how Slipstream's own engine computes: {ours}."])
        + "\n"
    )


def page_with(made: str) -> str:
    """The page with these tables."""
    return _between(_between(PAGE.read_text(), (BEGIN, END), made), ENGINE, engine_tables())


def _between(page: str, marks: tuple[str, str], made: str) -> str:
    parts = re.split("({}|{})".format(*marks), page)
    assert len(parts) == 5
    return "".join([*parts[:2], made, *parts[3:]])


if __name__ == "__main__":
    PAGE.write_text(page_with(tables()))
