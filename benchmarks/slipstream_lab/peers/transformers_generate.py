"""transformers' `generate` with a static batch, in this or another environment:

    python transformers_generate.py MODEL STREAMS INPUT_LEN OUTPUT_LEN RUNS THREADS

Prints a line of JSON, {"tokens_per_s": [of each run]}. A run before them warms up.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Measure and print."""
    path, *sizes = sys.argv[1:]
    streams, input_len, output_len, runs, threads = map(int, sizes)
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    draw = torch.Generator().manual_seed(0)

    def tokens_per_s() -> float:
        ids = torch.randint(300, 1000, (streams, input_len), generator=draw)
        begin = time.perf_counter()
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=output_len,
                min_new_tokens=output_len,
                pad_token_id=3,
                eos_token_id=None,
            )
        taken_s = time.perf_counter() - begin
        return made[:, input_len:].numel() / taken_s

    tokens_per_s()
    print(json.dumps({"tokens_per_s": [tokens_per_s() for _ in range(runs)]}))


if __name__ == "__main__":
    main()
