"""What tokens read like, by every kind of vocabulary; and log-probabilities in their shapes."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

from tests.oracles.completion_logprobs import completion_logprobs
from tokenizers import AddedToken, Tokenizer, decoders, models

from slipstream.delta_batch import Logprob
from slipstream.demo_model import MODEL_PATH
from slipstream.http.logprobs.logprob_bodies import TextPosition, chat_logprobs
from slipstream.http.logprobs.vocabulary import TokenTexts


def loaded(path: Path) -> TokenTexts:
    texts = TokenTexts(str(path))

    async def wait() -> None:
        ready = asyncio.get_running_loop().create_future()
        texts.when_loaded(lambda: ready.set_result(None))
        await ready

    asyncio.run(wait())
    return texts


def texts_of(folder: Path, pieces: list[str], decoder: object, special: str = "<s>") -> TokenTexts:
    vocabulary = {piece: index for index, piece in enumerate([*pieces, special])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=pieces[0]))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(special, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return loaded(folder)


def raws(texts: TokenTexts, number: int) -> list[bytes | None]:
    return [texts.of(index).raw for index in range(number)]


def test_byte_level(tmp_path):
    texts = texts_of(tmp_path, ["Ġa", "Ċ", "ð", "Ł", "é"], decoders.ByteLevel())
    assert raws(texts, 6) == [b" a", b"\n", b"\xf0", b"\x9f", b"\xe9", b"<s>"]
    half = texts.of(2)
    assert (half.text, half.name) == ("\ufffd", "bytes:\\xf0")


def test_byte_fallback_and_metaspace(tmp_path):
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    texts = texts_of(tmp_path, ["▁a", "<0xE2>", "é", "<0xZZ>"[:5]], decoders.Sequence(steps))
    assert raws(texts, 3) == [b" a", b"\xe2", "é".encode()]
    texts = texts_of(tmp_path, ["▁a", "b▁c"], decoders.Metaspace())
    assert raws(texts, 2) == [b" a", b"b c"]


def test_word_pieces(tmp_path):
    texts = texts_of(tmp_path, ["a", "##b"], decoders.WordPiece())
    assert raws(texts, 2) == [b"a", b"b"]


def test_ids_that_nobody_knows(tmp_path):
    texts = texts_of(tmp_path, ["a"], decoders.ByteLevel())
    assert (texts.of(99).text, texts.of(99).raw) == ("token_id:99", None)
    missing = loaded(tmp_path / "nowhere")
    assert missing.of(0).text == "token_id:0"


def test_the_demo_models_tokens_are_its_texts_bytes():
    texts = loaded(MODEL_PATH)
    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    text = "In Python, naïve — 𝄞 lists\n\tare  mutable."
    ids = tokenizer.encode(text).ids
    assert b"".join(texts.of(each).raw or b"" for each in ids).decode() == text


def test_offsets_count_whole_characters():
    position = TextPosition()
    offsets = []
    for raw in (b"a", b"\xf0\x9d", b"\x84", b"\x9eb", b"c"):
        offsets.append(position.offset)
        position.advance(raw)
    assert offsets == [0, 1, 1, 1, 3]
    assert position.offset == 4


def entry(*candidates: tuple[int, float, int]) -> dict[int, Logprob]:
    return {token: Logprob(value, rank, token) for token, value, rank in candidates}


def test_shapes(tmp_path):
    texts = texts_of(tmp_path, ["a", "b", "c"], decoders.ByteLevel())
    sampled_third = entry((2, -math.inf, 3), (0, -0.5, 1), (1, -1.0, 2))
    sampled_second = entry((1, -1.0, 2), (0, -0.5, 1))
    columns = completion_logprobs([sampled_third, sampled_second], 2, texts, TextPosition())
    assert columns.tokens == ["c", "b"]
    assert columns.token_logprobs == [-9999.0, -1.0]
    assert columns.text_offset == [0, 1]
    assert columns.top_logprobs == [{"c": -9999.0, "a": -0.5, "b": -1.0}, {"b": -1.0, "a": -0.5}]
    content = chat_logprobs([sampled_third, sampled_second], 2, texts).content
    assert [(each.token, each.bytes) for each in content] == [("c", [99]), ("b", [98])]
    assert [[top.token for top in each.top_logprobs] for each in content] == [["a", "b"]] * 2
    assert chat_logprobs([sampled_second], 0, texts).content[0].top_logprobs == []
