"""Answers of vLLM itself, run with the Python that has it: MODEL and the requests as JSON on
standard input; ids and log-probabilities as JSON on the last line.
"""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from vllm import LLM, SamplingParams

asked = json.load(sys.stdin)
llm = LLM(asked["model"], seed=0, **asked["options"])
prompts = [{"prompt_token_ids": each["prompt"]} for each in asked["requests"]]
for each in asked["requests"]:
    biases = each["params"].get("logit_bias") or {}  # whose names JSON makes text of
    each["params"]["logit_bias"] = {int(i): bias for i, bias in biases.items()} or None
params = [SamplingParams(detokenize=False, **each["params"]) for each in asked["requests"]]
answers = [
    {
        "ids": list(one.token_ids),
        "logprobs": [[each[i].logprob for i in sorted(each)] for each in one.logprobs or ()],
    }
    for output in llm.generate(prompts, params, use_tqdm=False)
    for one in output.outputs
]
print(json.dumps(answers))  # noqa: T201
os._exit(0)
