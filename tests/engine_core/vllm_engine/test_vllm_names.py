"""The names of vLLM's that the adapter uses, in vLLM's sources: of every version that is unpacked.

SLIPSTREAM_VLLM_SOURCES names folders that have `vllm`, separated by colons: site-packages, or
wheels that were unpacked. Nothing of them is imported. Without it only the check of the checker
runs.
"""

from __future__ import annotations

import ast
import os
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from tests.helpers import fake_vllm

SOURCES = [Path(each) for each in os.environ.get("SLIPSTREAM_VLLM_SOURCES", "").split(":") if each]

# class by file: the members that the adapter reads or sets
MEMBERS = {
    "v1/engine/core.py": {
        "EngineCore": "model_executor scheduler shutdown step_fn vllm_config",
    },
    "v1/engine/__init__.py": {
        "EngineCoreRequest": """
            request_id prompt_token_ids mm_features sampling_params pooling_params arrival_time
            lora_request cache_salt data_parallel_rank priority""",
        "EngineCoreOutput": """
            request_id new_token_ids new_prompt_logprobs_tensors finish_reason prefill_stats""",
        "EngineCoreOutputs": "outputs",
        "FinishReason": "STOP LENGTH ABORT ERROR",
    },
    "lora/request.py": {"LoRARequest": "lora_name lora_int_id lora_path"},
    "v1/outputs.py": {
        "ModelRunnerOutput": "req_id_to_index logprobs",
        "LogprobsLists": """
            logprobs logprob_token_ids sampled_token_ranks cu_num_generated_tokens""",
        "LogprobsTensors": "logprobs logprob_token_ids selected_token_ranks",
    },
    "v1/core/sched/output.py": {
        "GrammarOutput": "structured_output_request_ids grammar_bitmask",
        "SchedulerOutput": """
            num_scheduled_tokens total_num_scheduled_tokens scheduled_cached_reqs
            has_structured_output_requests""",
        "CachedRequestData": "resumed_req_ids",
    },
    "v1/request.py": {"Request": "append_output_token_ids is_prefill_chunk"},
    "v1/core/sched/scheduler.py": {"Scheduler": "requests kv_cache_manager"},
    "v1/core/kv_cache_manager.py": {"KVCacheManager": "block_pool"},
    "v1/metrics/stats.py": {"PrefillStats": "num_cached_tokens"},
    "usage/usage_lib.py": {"UsageContext": "OPENAI_API_SERVER"},
    "config/model.py": {"ModelConfig": "max_model_len hf_text_config"},
    "config/scheduler.py": {"SchedulerConfig": "max_num_seqs async_scheduling"},
    "config/cache.py": {"CacheConfig": "num_gpu_blocks block_size"},
    "config/speculative.py": {"SpeculativeConfig": "num_speculative_tokens"},
    "config/vllm.py": {
        "VllmConfig": """
            model_config cache_config scheduler_config speculative_config
            structured_outputs_config""",
    },
    "engine/arg_utils.py": {
        "EngineArgs": " ".join(
            field.name for field in fields(fake_vllm.EngineArgs) if field.name != "vocab_size"
        ),
    },
    "v1/worker/gpu_model_runner.py": {"GPUModelRunner": "sampler"},
    "v1/sample/sampler.py": {"Sampler": "topk_topp_sampler"},
    "sampling_params.py": {
        "SamplingParams": """
            temperature top_k top_p min_p seed max_tokens min_tokens stop_token_ids ignore_eos
            detokenize logprobs logprob_token_ids prompt_logprobs presence_penalty
            frequency_penalty repetition_penalty logit_bias allowed_token_ids extra_args skip_clone
            _bad_words_token_ids""",
    },
}

# the parameters that a method is called with, by position
SIGNATURES = {
    "v1/engine/core.py": {
        "EngineCore.__init__": "vllm_config executor_class log_stats",
        "EngineCore.preprocess_add_request": "request",
        "EngineCore.add_request": "request request_wave",
        "EngineCore.abort_requests": "request_ids",
        "EngineCore.post_step": "model_executed",
        "EngineCore.add_lora": "lora_request",
        "EngineCore.remove_lora": "lora_id",
    },
    "v1/core/sched/scheduler.py": {
        "Scheduler.update_from_output": "scheduler_output model_runner_output",
        "Scheduler.get_grammar_bitmask": "scheduler_output",
    },
    "v1/worker/gpu_model_runner.py": {"GPUModelRunner.__init__": "vllm_config device"},
    "v1/sample/ops/topk_topp_sampler.py": {"TopKTopPSampler.forward_cpu": "logits generators k p"},
    "v1/core/block_pool.py": {"BlockPool.get_num_free_blocks": ""},
    "v1/request.py": {"Request.append_output_token_ids": "token_ids"},
    "v1/executor/abstract.py": {"Executor.get_class": "vllm_config"},
    "platforms/interface.py": {"Platform.is_cpu": ""},
    "config/model.py": {
        "ModelConfig.get_vocab_size": "",
        "ModelConfig.get_diff_sampling_param": "",
        "ModelConfig.try_get_generation_config": "",
    },
    "engine/arg_utils.py": {"EngineArgs.create_engine_config": "usage_context"},
    "sampling_params.py": {
        "SamplingParams.verify": """
            model_config speculative_config structured_outputs_config tokenizer""",
    },
}

# a function of a module, the keywords of a call in it that `worker_extension` answers
CALLS = {
    "v1/worker/gpu_model_runner.py": {
        "CachedRequestState": "sampling_params generator output_token_ids",
    },
}


@cache
def tree(source: Path, file: str) -> ast.Module:
    return ast.parse((source / "vllm" / file).read_text())


def class_of(source: Path, file: str, name: str) -> ast.ClassDef:
    for node in ast.walk(tree(source, file)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise AssertionError(f"{file} has no class {name}")


def members(found: ast.ClassDef) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(found):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
            case _:
                pass
    return names


def lacks(source: Path) -> list[str]:
    """What the adapter uses and this vLLM does not have."""
    found: list[str] = []
    for file, classes in MEMBERS.items():
        for name, wanted in classes.items():
            missing = set(wanted.split()) - members(class_of(source, file, name))
            found += [f"{file}: {name}.{each}" for each in sorted(missing)]
    for file, methods in SIGNATURES.items():
        for name, wanted in methods.items():
            owner, method = name.split(".")
            made = class_of(source, file, owner)
            given = next(
                (n for n in made.body if isinstance(n, ast.FunctionDef) and n.name == method), None
            )
            names = [] if given is None else [each.arg for each in given.args.args]
            is_static = given is not None and "staticmethod" in map(
                ast.unparse, given.decorator_list
            )
            names = names if is_static else names[1:]
            num = len(wanted.split())
            num_needed = 0 if given is None else len(names) - len(given.args.defaults)
            if given is None or names[:num] != wanted.split() or num_needed > num:
                found.append(f"{file}: {name}({', '.join(names)})")
    for file, calls in CALLS.items():
        for name, wanted in calls.items():
            keywords = {
                each.arg
                for node in ast.walk(tree(source, file))
                if isinstance(node, ast.Call) and ast.unparse(node.func) == name
                for each in node.keywords
            }
            found += [f"{file}: {name}({each}=)" for each in set(wanted.split()) - keywords]
    return found


@pytest.mark.skipif(not SOURCES, reason="SLIPSTREAM_VLLM_SOURCES names no vLLM")
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_vllm_has_what_the_adapter_uses(source: Path) -> None:
    assert lacks(source) == []


def test_what_is_missing_is_found(tmp_path: Path) -> None:
    text = """
class Thing:
    one: int
    def __init__(self, a, b=1):
        self.two = 2
    def three(self, x, y): ...
"""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "thing.py").write_text(text)
    thing = class_of(tmp_path, "thing.py", "Thing")
    assert members(thing) == {"one", "two", "three", "__init__"}
    with pytest.raises(AssertionError, match="no class Other"):
        class_of(tmp_path, "thing.py", "Other")
