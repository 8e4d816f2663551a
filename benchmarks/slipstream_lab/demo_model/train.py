"""Train the bundled demo model: `scripts/train-demo`, with one thread and no network.

A tiny Llama and its byte-level BPE tokenizer learn Python's own reference texts: the language
reference's topics and the standard library's docstrings (licence: PSF-2.0; see
`slipstream_lab.demo_model.corpus`), as plain documents and as chats in the model's own template,
and common questions with answers written for it (`slipstream_lab.demo_model.questions`).

A first part trains the language; a second, short one asks in further wordings, at a lower rate. A
third asks in many more, each chat in a row of its own, as a chat begins when the model is asked. A
fourth does so again, from the bundled weights and with their tokenizer, when answers were added.

Text, its order and the initial weights are a function of the Python version and the seed. The
number of steps is fixed; with one thread the same machine and torch train the same weights.
"""

import argparse
import copy
import math
import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.distributed as distributed
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
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
END_OF_TEXT_ID, END_OF_TURN_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID = range(5)
"""The trainer numbers special tokens first, in order."""
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
SEQUENCE_LENGTHS = (256, 256, 256, 256, 256, 256, 256, 512, 512, 1024)
"""Drawn per batch: mostly short, which is fast; now and then long, to learn far positions."""
NUM_STEPS = 4200
NUM_FURTHER_STEPS = 350
"""Steps of the second part, which asks in further wordings and counts no document's end."""
NUM_LAST_STEPS = 3850
NUM_WARM_UP_STEPS = 100
NUM_COOLING_STEPS = 1500
"""Steps of the third part, of its beginning, and of its end, in which the rate falls to zero."""
PACKED_SHARE = 0.15
"""So many batches of the third part are packed as in the others, for far positions."""
POOL_PIECES = 1000
EXCERPT_CHARS = 1000
OPENING_TOKENS = 16
OPENING_WEIGHT = 3.0
"""The weight of the first half of an answer's opening in the loss; the rest of the answer has 1."""
CUT_SHARE = 0.8
LAST_CUT_SHARE = 0.9
"""So many chats end after their last answer's opening, the second in the third part."""
PIECE_TOKENS = 300
PIECE_SHARE = 0.7
"""An epoch has so many of the pieces of each document."""
PEAK_LEARNING_RATE = 4e-3
FURTHER_LEARNING_RATE = 1e-3
LAST_LEARNING_RATE = 2e-3
WARM_UP_SHARE = 0.03
MAX_GRADIENT_NORM = 1.0
KEPT_EVERY = 100
HAS_BFLOAT16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
"""Without it products in bfloat16 take many times those in float32."""


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


def tokenizer_texts(entries: list[corpus.CorpusEntry], seed: int) -> list[str]:
    """The texts that tokens are made of: each entry once, and an epoch's questions."""
    rng = Random(seed)  # noqa: S311  (choice of questions, not a secret)
    _, chats = corpus.epoch(corpus.topic_entries(), [], rng)
    said = [message["content"] for chat in chats for message in chat]
    return [*(corpus.document(entry) for entry in entries), *rng.sample(said, 4000)]


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


def epochs(
    tokenizer: PreTrainedTokenizerFast, seed: int, *, part: int = 1
) -> Iterator[list[np.ndarray]]:
    """Endless epochs of chats and pieces of documents, shuffled.

    Returns:
        float32 [3, tokens] for each piece: a token's id (exact below 2**24), the weight of its
        loss, and 1 where it is of a chat.
    """
    rng = Random(seed)  # noqa: S311  (order of the text, not a secret)
    topics, others = corpus.topic_entries(), corpus.docstrings()
    while True:
        cut = LAST_CUT_SHARE if part > 2 else CUT_SHARE
        documents, chats = corpus.epoch(topics, others, rng, part=part)
        if part > 2:
            documents = [each for text in documents for each in excerpts(text, rng)]
        rendered = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        texts = [f"{text}{END_OF_TEXT}" for text in [*documents, *rendered]]
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts)
        pieces = [piece for e in encodings for piece in weighed(np.asarray(e.ids), rng, cut)]
        if part > 1:  # a text that is to be continued should not end after its first sentence
            for piece in pieces:
                piece[1, piece[0] == END_OF_TEXT_ID] = 0.0
        rng.shuffle(pieces)
        yield pieces


def excerpts(text: str, rng: Random) -> list[str]:
    """Cut a document before paragraphs, at random ones, so that each excerpt begins as a text."""
    cut: list[str] = []
    limit = 0
    for paragraph in text.split("\n\n"):
        if not cut or len(cut[-1]) + len(paragraph) > limit:
            cut.append(paragraph)
            limit = rng.randint(EXCERPT_CHARS // 4, EXCERPT_CHARS)
        else:
            cut[-1] += f"\n\n{paragraph}"
    return cut


def weighed(ids: np.ndarray, rng: Random, cut_share: float = CUT_SHARE) -> list[np.ndarray]:
    """Weigh the tokens of one text, int64 [tokens]: pieces as in an epoch, float32 [3, n].

    All of a document counts; it is cut into pieces, so that no batch is one document's alone, and
    most of them are taken. Of a chat only answers do, and their openings most: there it is decided
    which answer it is. Most last answers end after the opening, which leaves time for more
    questions.
    """
    weights = np.ones(len(ids), dtype=np.float32)
    starts = np.flatnonzero(ids == ASSISTANT_ID)
    if not len(starts):
        weights[::PIECE_TOKENS] = 0.0
        whole = np.stack([ids.astype(np.float32), weights, np.zeros_like(weights)])
        pieces = [whole[:, n : n + PIECE_TOKENS] for n in range(0, len(ids), PIECE_TOKENS)]
        return [piece for piece in pieces if rng.random() < PIECE_SHARE]
    weights[:] = 0.0
    for start in starts.tolist():
        end = start + int(np.argmax(ids[start:] == END_OF_TURN_ID))
        weights[start + 2 : end + 1] = 1.0
        weights[start + 2 : min(start + 2 + OPENING_TOKENS // 2, end + 1)] = OPENING_WEIGHT
    cut = int(starts[-1]) + 2 + OPENING_TOKENS
    if cut < len(ids) - 3 and rng.random() < cut_share:
        ids, weights = np.append(ids[:cut], END_OF_TEXT_ID), np.append(weights[:cut], 0.0)
    return [np.stack([ids.astype(np.float32), weights, np.ones_like(weights)])]


def batches(
    pieces: Iterator[list[np.ndarray]], seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Packed batches of ids, int64, and weights, float32, each [BATCH_TOKENS / length, length].

    Texts follow each other unpadded. What is left of a chat whose question is in the row before
    does not count: an answer without its question would teach documents to end as answers do.
    """
    rng = Random(seed)  # noqa: S311  (shape of the batches, not a secret)
    stock = np.empty((3, 0), dtype=np.float32)
    while True:
        while stock.shape[1] < BATCH_TOKENS:
            stock = np.concatenate([stock, *next(pieces)], axis=1)
        batch, stock = stock[:, :BATCH_TOKENS], stock[:, BATCH_TOKENS:]
        ids, weights, is_chat = batch.reshape(3, -1, rng.choice(SEQUENCE_LENGTHS))
        begun = np.cumsum(np.isin(ids, (SYSTEM_ID, USER_ID)), axis=1) > 0
        weights = np.where((is_chat == 0) | begun, weights, np.float32(0))
        yield torch.from_numpy(ids).long(), torch.from_numpy(weights)


def lone_batches(
    pieces: Iterator[list[np.ndarray]], seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of ids and weights as those of `batches`, [rows, length], with a piece in each row.

    So each text begins at position 0, with nothing before it. Pieces of like lengths share a batch
    of at most BATCH_TOKENS; the shorter are padded at their end, where nothing counts.
    """
    rng = Random(seed)  # noqa: S311  (order of the batches, not a secret)
    while True:
        epoch = next(pieces)
        for start in range(0, len(epoch), POOL_PIECES):
            pool = sorted(epoch[start : start + POOL_PIECES], key=lambda piece: piece.shape[1])
            groups: list[list[np.ndarray]] = [[]]
            for piece in pool:
                if (len(groups[-1]) + 1) * piece.shape[1] > BATCH_TOKENS and groups[-1]:
                    groups.append([])
                groups[-1].append(piece)
            rng.shuffle(groups)
            for group in groups:
                padded = np.zeros((len(group), 2, max(each.shape[1] for each in group)), np.float32)
                for row, piece in zip(padded, group, strict=True):
                    row[:, : piece.shape[1]] = piece[:2]
                yield torch.from_numpy(padded[:, 0]).long(), torch.from_numpy(padded[:, 1])


def last_batches(
    tokenizer: PreTrainedTokenizerFast, seed: int, *, part: int = 3
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of the third part and the fourth: most of `lone_batches`, some of `batches`."""
    rng = Random(seed)  # noqa: S311  (order of the batches, not a secret)
    alone = lone_batches(epochs(tokenizer, seed, part=part), seed)
    packed = batches(epochs(tokenizer, seed + 1, part=part), seed)
    while True:
        yield next(packed if rng.random() < PACKED_SHARE else alone)


def cosine(step: int, num_steps: int) -> float:
    """Linear warm-up to 1, then a cosine to 0, over the share of the steps done."""
    share = step / num_steps
    if share < WARM_UP_SHARE:
        return share / WARM_UP_SHARE
    decayed = min(1.0, (share - WARM_UP_SHARE) / (1 - WARM_UP_SHARE))
    return 0.5 * (1 + math.cos(math.pi * decayed))


def late_cooling(step: int, num_steps: int) -> float:
    """Linear warm-up to 1, which holds until the last steps, then a line to 0."""
    cooling = min(NUM_COOLING_STEPS, num_steps // 2)
    return min(1.0, step / NUM_WARM_UP_STEPS, (num_steps - step) / cooling)


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


def average_gradients(model: LlamaForCausalLM) -> None:
    """Make each process's gradients the mean of all, where `torchrun` started several."""
    if distributed.is_initialized():
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        joined = torch.cat([each.flatten() for each in gradients])
        distributed.all_reduce(joined)
        joined /= distributed.get_world_size()
        parts = torch.split(joined, [each.numel() for each in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def orthogonal(
    grad: torch.Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> torch.Tensor:
    """Muon's Newton-Schulz iteration as torch has it, but in the gradient's own type."""
    a, b, c = ns_coefficients
    is_tall = grad.size(0) > grad.size(1)
    update = grad.T if is_tall else grad
    update = update / update.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = update @ update.T
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        update = torch.addmm(update, gram, update, beta=a)
    return update.T if is_tall else update


def batch_loss(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean loss, in nats per token; only tokens that count cost logits."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    counts = weights[:, 1:] > 0
    losses = F.cross_entropy(model.lm_head(hidden[counts]), ids[:, 1:][counts], reduction="none")
    weight = weights[:, 1:][counts]
    return (losses * weight).sum() / weight.sum().clamp(min=1.0)


def train(
    model: LlamaForCausalLM,
    stream: Iterator[tuple[torch.Tensor, torch.Tensor]],
    num_steps: int,
    peak: float,
    keep: Callable[[int], None],
    rate: Callable[[int, int], float] = cosine,
) -> None:
    """Train `model` in place for `num_steps` batches.

    The loss is printed every 50 of them, and `keep` is called with the step every `KEPT_EVERY`.
    """
    optimizers = build_optimizers(model)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    model.train()
    started = time.monotonic()
    smoothed = None
    for step, (ids, weights) in enumerate(islice(stream, num_steps), start=1):
        for group in groups:
            group["lr"] = peak * rate(step, num_steps)
        with torch.autocast("cpu", torch.bfloat16, enabled=HAS_BFLOAT16):  # products alone
            loss = batch_loss(model, ids, weights)
        loss.backward()  # type: ignore[no-untyped-call]  # torch is half typed
        average_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        smoothed = loss.item() if smoothed is None else 0.98 * smoothed + 0.02 * loss.item()
        if step % 50 == 0 or step == num_steps:
            print(
                f"step {step:5d} of {num_steps}  {time.monotonic() - started:6.0f} s"
                f"  tokens {step * BATCH_TOKENS / 1e6:6.2f} M  loss {smoothed:.3f}",
                flush=True,
            )
        if step % KEPT_EVERY == 0:
            keep(step)


def main() -> None:
    """Read the options, train, save tokenizer and model (bfloat16) under `--out`."""
    parser = argparse.ArgumentParser(description="Train Slipstream's bundled demo model.")
    parser.add_argument("--out", type=Path, default=MODEL_PATH, help="folder of the artefacts")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="of 2,048 tokens each")
    parser.add_argument("--further-steps", type=int, default=NUM_FURTHER_STEPS, help="second part")
    parser.add_argument("--last-steps", type=int, default=NUM_LAST_STEPS, help="third part")
    parser.add_argument("--first", type=Path, help="the first part's result, from --checkpoints")
    parser.add_argument("--second", type=Path, help="the second part's result, likewise")
    parser.add_argument("--third", type=Path, help="the third part's result; trains the fourth")
    parser.add_argument("--seed", type=int, default=0, help="seed of text order and weights")
    parser.add_argument("--checkpoints", type=Path, help="folder for the weights of each 100 steps")
    parser.add_argument("--threads", type=int, default=1, help="more may train other weights")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.threads < 1:
        parser.error("--steps and --threads must be at least 1")

    if not HAS_BFLOAT16:
        torch.optim._muon._zeropower_via_newtonschulz = orthogonal
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    entries = corpus.topic_entries() + corpus.docstrings()
    begun = arguments.third or arguments.second or arguments.first
    tokenizer = (
        PreTrainedTokenizerFast.from_pretrained(begun)  # weights belong to their tokenizer
        if begun
        else train_tokenizer(tokenizer_texts(entries, arguments.seed))
    )
    model = build_model()
    size = sum(p.numel() for p in model.parameters())
    print(f"{len(entries)} texts, {size / 1e6:.2f} M parameters", flush=True)

    def save(folder: Path, trained: LlamaForCausalLM) -> None:
        if distributed.is_initialized() and distributed.get_rank():
            return
        trained.save_pretrained(folder)
        (folder / "model.safetensors").chmod(0o644)  # safetensors writes files with mode 0600
        tokenizer.save_pretrained(folder)

    def keep(name: object) -> None:
        if arguments.checkpoints:
            save(arguments.checkpoints / f"{name}", copy.deepcopy(model).bfloat16())

    seed = arguments.seed
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
        seed += 1000 * distributed.get_rank()  # another text each
    if begun:
        model = LlamaForCausalLM.from_pretrained(begun)
    else:
        stream = batches(epochs(tokenizer, seed), seed)
        train(model, stream, arguments.steps, PEAK_LEARNING_RATE, keep)
        keep("first")
    if not (arguments.third or arguments.second):
        model = rounded(model)
        stream = batches(epochs(tokenizer, seed + 1, part=2), seed + 1)
        train(model, stream, arguments.further_steps, FURTHER_LEARNING_RATE, lambda _: None)
        keep("second")
    model = rounded(model)
    stream = last_batches(tokenizer, seed + 2, part=4 if arguments.third else 3)
    steps = arguments.last_steps
    train(model, stream, steps, LAST_LEARNING_RATE, lambda n: keep(f"last-{n}"), late_cooling)
    save(arguments.out, model.bfloat16())
    print(f"saved to {arguments.out}")


def rounded(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return the model in float32 with the weights that a checkpoint of it holds."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    model.float()  # type: ignore[no-untyped-call]  # torch is half typed
    return model


if __name__ == "__main__":
    main()
