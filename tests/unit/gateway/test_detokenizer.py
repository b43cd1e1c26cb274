from __future__ import annotations

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.detokenizer import Detokenizer, decode


class Bytes:
    """A vocabulary in which every token is one byte."""

    strips_first_space = False

    def bytes_of(self, token_id):
        return bytes([token_id])


def pieces(vocabulary, token_ids):
    detokenizer = Detokenizer(vocabulary)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def test_an_emoji_split_over_tokens_comes_out_whole_with_its_last_byte():
    assert pieces(Bytes(), "😊".encode()) == ["", "", "", "😊", ""]


@pytest.mark.parametrize("tail", [b"\xf0", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xc3", b"\xe2\x82"])
def test_an_unfinished_character_is_flushed_once(tail):
    assert pieces(Bytes(), b"ab" + tail) == ["a", "b", *[""] * len(tail), "\ufffd"]


def test_a_byte_that_cannot_begin_a_character_is_not_held_back():
    assert pieces(Bytes(), b"\xffa") == ["\ufffd", "a", ""]


def test_a_character_cut_short_does_not_take_the_next_one_with_it():
    assert "".join(pieces(Bytes(), b"\xf0\x9f" + "é".encode())) == "\ufffdé"


@given(st.binary(max_size=40))
@example(b"\xed\xa0")  # half of a surrogate pair
def test_pieces_joined_are_the_whole_text_and_hold_at_most_three_bytes(data):
    detokenizer, text = Detokenizer(Bytes()), ""
    for end, byte in enumerate(data, start=1):
        text += detokenizer.push(byte)
        whole = data[:end].decode(errors="replace")
        # What is missing now are the at most three bytes of an unfinished character, which
        # `whole` shows as one U+FFFD, or as one per byte if they can never be a character.
        assert whole in [text + "\ufffd" * count for count in range(4)]
    assert text + detokenizer.flush() == data.decode(errors="replace")


@pytest.fixture(scope="module")
def library(model_files):
    return tokenizers.Tokenizer.from_file(str(model_files.directory / "tokenizer.json"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_random_tokens_give_the_librarys_text(real_tokenizer, library, data):
    ids = data.draw(st.lists(st.integers(0, real_tokenizer.vocab_size - 1), max_size=30))
    detokenizer = real_tokenizer.detokenizer()
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    assert text == library.decode(ids, skip_special_tokens=True)
    assert text == real_tokenizer.decode(ids)


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "naïve café",
        "日本語のテキスト",
        "مرحبا بالعالم",
        "👩‍👩‍👧 🇨🇭 😊",
        "Ελληνικά",
        "हिन्दी",
        "\n\t  x",
    ],
)
def test_text_survives_encoding_and_streaming(real_tokenizer, text):
    ids = real_tokenizer.encode(text)
    assert "".join(pieces_of(real_tokenizer, ids)) == text


def pieces_of(tokenizer, ids):
    detokenizer = tokenizer.detokenizer()
    streamed = [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]
    assert not any("\ufffd" in piece for piece in streamed)
    return streamed


def test_the_tokenizers_own_first_space_is_dropped_once():
    class Spaced(Bytes):
        strips_first_space = True

    assert pieces(Spaced(), b" a b") == ["", "a", " ", "b", ""]
    assert decode(Spaced(), b"  a") == " a"
