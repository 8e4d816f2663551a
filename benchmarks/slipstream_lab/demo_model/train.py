"""Train the bundled demo model: `scripts/train-demo`, half an hour with one thread, no network.

A tiny Llama and its byte-level BPE tokenizer learn Python's own reference texts: the language
reference's topics and the standard library's docstrings (licence: PSF-2.0; see
`slipstream_lab.demo_model.corpus`), as plain documents and as chats in the model's own template.

Text, its order and the initial weights are a function of the Python version and the seed. The
number of steps is fixed; with one thread the same machine and torch train the same weights.
"""

import argparse
import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from slipstream.demo_model import MODEL_PATH
from slipstream_lab.demo_model import corpus

__all__ = ["main"]

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|end|>"
SPECIAL_TOKENS = [END_OF_TEXT, END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>"]
END_OF_TEXT_ID, END_OF_TURN_ID = 0, 1  # the trainer numbers special tokens first, in order
CHAT_TEMPLATE = """\
{%- set turns = {'system': 'system', 'developer': 'system', 'user': 'user', 'tool': 'user',
  'assistant': 'assistant'} -%}
{%- for message in messages -%}
{%- if message['role'] not in turns -%}
{{ raise_exception("role '" + message['role'] + "' is not " + turns | join(', ')) }}
{%- endif -%}
{{ '<|' + turns[message['role']] + '|>\\n' + (message['content'] or '') }}
{%- for call in message['tool_calls'] or [] -%}
{%- set function = call['function'] -%}
{{ '\\n' if message['content'] or not loop.first }}{{ function['name'] + ' ' -}}
{{ function['arguments'] if function['arguments'] is string else function['arguments'] | tojson }}
{%- endfor -%}
{{ '<|end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|assistant|>\\n' }}
{%- endif -%}
"""
VOCAB_SIZE = 4096
MAX_POSITIONS = 2048
BATCH_TOKENS = 2048
SEQUENCE_LENGTHS = (256, 256, 512, 512, 512, 1024)
"""Drawn per batch: mostly short, which is fast; now and then long, to learn far positions."""
NUM_STEPS = 3000
PEAK_LEARNING_RATE = 4e-3
WARM_UP_SHARE = 0.03
MAX_GRADIENT_NORM = 1.0


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCAB_SIZE` tokens: any text comes back as it went in."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers is half typed
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=SPECIAL_TOKENS[2:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def build_model() -> LlamaForCausalLM:
    """A Llama of 2.75 million parameters, freshly initialised, in float32."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_OF_TURN_ID,
        pad_token_id=END_OF_TEXT_ID,
    )
    model = LlamaForCausalLM(config)
    ends = [END_OF_TURN_ID, END_OF_TEXT_ID]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=ends, pad_token_id=END_OF_TEXT_ID
    )
    return model


def epochs(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[np.ndarray]:
    """Endless epochs, each one row of token ids, int64 [tokens]: documents and chats, shuffled."""
    rng = Random(seed)  # noqa: S311  (order of the text, not a secret)
    topics, others = corpus.topic_entries(), corpus.docstrings()
    while True:
        documents, chats = corpus.epoch(topics, others, rng)
        rendered = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        texts = [f"{text}{END_OF_TEXT}" for text in [*documents, *rendered]]
        rng.shuffle(texts)
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts)
        yield np.concatenate([np.asarray(e.ids, dtype=np.int64) for e in encodings])


def batches(rows: Iterator[np.ndarray], seed: int) -> Iterator[torch.Tensor]:
    """Packed batches, int64 [BATCH_TOKENS / length, length]; texts follow each other unpadded."""
    rng = Random(seed)  # noqa: S311  (shape of the batches, not a secret)
    stock = np.empty(0, dtype=np.int64)
    while True:
        if len(stock) < BATCH_TOKENS:
            stock = np.concatenate([stock, next(rows)])
        batch, stock = stock[:BATCH_TOKENS], stock[BATCH_TOKENS:]
        yield torch.from_numpy(batch).view(-1, rng.choice(SEQUENCE_LENGTHS))


def learning_rate_factor(share: float) -> float:
    """Linear warm-up to 1, then a cosine to 0, over the share of the steps done."""
    if share < WARM_UP_SHARE:
        return share / WARM_UP_SHARE
    decayed = min(1.0, (share - WARM_UP_SHARE) / (1 - WARM_UP_SHARE))
    return 0.5 * (1 + math.cos(math.pi * decayed))


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, which learn faster by it, AdamW for embeddings and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    in_layers = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in in_layers]
    return [
        torch.optim.Muon(
            matrices, lr=PEAK_LEARNING_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(model: LlamaForCausalLM, stream: Iterator[torch.Tensor], num_steps: int) -> None:
    """Train `model` in place for `num_steps` batches, printing the loss every 100 of them."""
    optimizers = build_optimizers(model)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    model.train()
    started = time.monotonic()
    smoothed = None
    for step, batch in enumerate(islice(stream, num_steps), start=1):
        for group in groups:
            group["lr"] = PEAK_LEARNING_RATE * learning_rate_factor(step / num_steps)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        smoothed = loss.item() if smoothed is None else 0.98 * smoothed + 0.02 * loss.item()
        if step % 100 == 0 or step == num_steps:
            print(
                f"step {step:5d} of {num_steps}  {time.monotonic() - started:6.0f} s"
                f"  tokens {step * BATCH_TOKENS / 1e6:6.2f} M  loss {smoothed:.3f}",
                flush=True,
            )


def main() -> None:
    """Read the options, train, save tokenizer and model (bfloat16) under `--out`."""
    parser = argparse.ArgumentParser(description="Train Slipstream's bundled demo model.")
    parser.add_argument("--out", type=Path, default=MODEL_PATH, help="folder of the artefacts")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="of 2,048 tokens each")
    parser.add_argument("--seed", type=int, default=0, help="seed of text order and weights")
    parser.add_argument("--threads", type=int, default=1, help="more may train other weights")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.threads < 1:
        parser.error("--steps and --threads must be at least 1")

    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    torch.set_float32_matmul_precision("medium")  # bfloat16 products where the CPU has them
    entries = corpus.topic_entries() + corpus.docstrings()
    tokenizer = train_tokenizer([corpus.document(entry) for entry in entries])
    model = build_model()
    size = sum(p.numel() for p in model.parameters())
    print(f"{len(entries)} texts, {size / 1e6:.2f} M parameters", flush=True)
    stream = batches(epochs(tokenizer, arguments.seed), arguments.seed)
    train(model, stream, arguments.steps)
    model.bfloat16().save_pretrained(arguments.out)
    (arguments.out / "model.safetensors").chmod(0o644)  # safetensors writes files with mode 0600
    tokenizer.save_pretrained(arguments.out)
    print(f"saved to {arguments.out}")


if __name__ == "__main__":
    main()
