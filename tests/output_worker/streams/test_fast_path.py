"""Which tokens need no check."""

from __future__ import annotations

from slipstream_worker.detokenizer.text_columns import TextColumns, VocabularyView
from slipstream_worker.streams.fast_path import PlainTokens

WORD, SPECIAL, HALF = range(3)
COLUMNS = TextColumns(["a", "<s>", None], ["a", "", None])


def plain(tokens: PlainTokens, view: VocabularyView) -> list[int]:
    first = COLUMNS.first(view)
    return [token_id for token_id in (WORD, SPECIAL, HALF) if tokens.is_plain[first + token_id]]


def test_a_token_without_text_is_plain_only_where_no_text_is_wanted() -> None:
    tokens = PlainTokens(COLUMNS)
    assert plain(tokens, VocabularyView.SHOWN) == [WORD, SPECIAL]
    assert plain(tokens, VocabularyView.SKIPPED) == [WORD]
    assert plain(tokens, VocabularyView.SILENT) == [WORD, SPECIAL, HALF]


def test_a_token_that_ends_a_stream_is_plain_again_after_it() -> None:
    tokens = PlainTokens(COLUMNS)
    tokens.add_stops([WORD])
    assert [plain(tokens, view) for view in VocabularyView] == [[SPECIAL], [], [SPECIAL, HALF]]
    tokens.remove_stops([WORD])
    assert plain(tokens, VocabularyView.SILENT) == [WORD, SPECIAL, HALF]
