"""The texts of tokens read, joined, as the whole does; what cannot be seen is named."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from infra.viewer import visible
from infra.viewer.pieces import token_texts
from sao_core.models.tiny import build_tokenizer

BYTES = build_tokenizer()._tokenizer


def ids(text: str) -> list[int]:
    return list(BYTES.encode(text, add_special_tokens=False).ids)


def test_a_character_of_several_tokens_stands_with_the_first() -> None:
    assert token_texts(BYTES, ids("a€😀b")) == ["a", "€", None, None, "😀", None, None, None, "b"]


def test_bytes_that_are_no_character_are_shown_where_they_are() -> None:
    euro = ids("€")
    assert token_texts(BYTES, [euro[1], *ids("a"), *euro]) == ["\ufffd", "a", "€", None, None]
    assert token_texts(BYTES, [*ids("a"), *euro[:2]]) == ["a", "\ufffd", None]


def test_no_character_crosses_the_start_of_a_turn() -> None:
    euro = ids("€")
    assert token_texts(BYTES, [*euro[:2], *ids("b")], starts=[2]) == ["\ufffd", None, "b"]


def test_words_keep_the_space_that_a_decoder_drops_at_the_start() -> None:
    words = Tokenizer(models.WordLevel({"▁Hello": 0, "▁big": 1, "▁world": 2, "?": 3}, unk_token="?"))
    words.decoder = decoders.Metaspace()
    assert token_texts(words, [0, 1, 2, 2], starts=[3]) == ["Hello", " big", " world", " world"]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_the_texts_of_any_text_join_to_it(text: str) -> None:
    assert "".join(piece or "" for piece in token_texts(BYTES, ids(text))) == BYTES.decode(ids(text), False)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=40))
def test_the_texts_of_any_bytes_join_to_what_they_decode_to(tokens: list[int]) -> None:
    pieces = token_texts(BYTES, tokens)
    assert len(pieces) == len(tokens)
    assert "".join(piece or "" for piece in pieces) == BYTES.decode(tokens, False)


def test_a_long_run_of_broken_bytes_takes_time_that_grows_with_its_length() -> None:
    broken = ids("€")[1]
    started = time.process_time()
    assert token_texts(BYTES, [broken] * 20_000) == ["\ufffd"] * 20_000
    assert time.process_time() - started < 5.0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tab\tline\nend", "tab\tline\nend"),
        ("\x00\x07\x1b\r\x7f", "‹NUL›‹BEL›‹ESC›‹CR›‹U+007F›"),
        ("a\u202eb\u2066c\u200f", "a‹U+202E›b‹U+2066›c‹U+200F›"),
        ("\u2028\u2029\u0085", "‹U+2028›‹U+2029›‹U+0085›"),
        ("zero\u200bwidth\ufeff\u00ad", "zero‹U+200B›width‹U+FEFF›‹U+00AD›"),
        ("\ud800", "‹U+D800›"),
        ("\U000e0041", "‹U+E0041›"),
        ("👩\u200d🔬 نمی\u200cخواهم é 漢 \ufffd", "👩\u200d🔬 نمی\u200cخواهم é 漢 \ufffd"),
    ],
)
def test_what_cannot_be_seen_is_named(text: str, shown: str) -> None:
    assert visible(text) == shown
