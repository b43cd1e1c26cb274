"""Offsets and names of tokens, against texts decoded the slow way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.detokenizer import Detokenizer
from gateway.types import ScoredToken
from services.gateway.rest.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs

NAMES = {256: b"<s>", 257: b"<end>"}  # of special tokens


class Vocabulary:
    strips_first_space = False

    @staticmethod
    def bytes_of(token_id):
        return bytes([token_id]) if token_id < 256 else b""


def token_bytes(token_id):
    return NAMES.get(token_id) or bytes([token_id])


def scored(token_ids):
    return [ScoredToken(token_id, -1.0) for token_id in token_ids]


def writer():
    return CompletionLogprobs(token_bytes, Detokenizer(Vocabulary), 0)


@given(st.lists(st.text(max_size=6), max_size=4))
def test_an_offset_is_the_number_of_whole_characters_before(parts):
    form, offsets = writer(), []
    for part in parts:
        offsets += form.add(scored(part.encode()))["text_offset"]
    data = "".join(parts).encode()
    before = [data[:end].decode(errors="ignore") for end in range(len(data))]
    assert offsets == list(map(len, before))


@given(st.lists(st.one_of(st.text(max_size=3), st.sampled_from([256, 257])), max_size=6))
def test_special_tokens_count_where_the_prompt_has_their_names(parts):
    token_ids, text, expected = [97], "a", [0]
    for part in parts:
        if isinstance(part, int):
            token_ids.append(part)
            expected.append(len(text))
            text += NAMES[part].decode()
        else:
            for character in part:
                token_ids += character.encode()
                expected += [len(text)] * len(character.encode())
                text += character
    form, detokenizer = writer(), Detokenizer(Vocabulary)
    shown = form.add_prompt(text, token_ids, scored(token_ids[1:]), detokenizer)
    assert shown["text_offset"] == expected
    assert form.add(scored([98]))["text_offset"] == [len(text)]
    assert {len(values) for values in shown.values()} == {len(token_ids)}


def test_special_tokens_that_the_text_does_not_show_have_no_length():
    shown = writer().add_prompt(
        "ab", [256, 97, 257, 98], scored([97, 257, 98]), Detokenizer(Vocabulary)
    )
    assert shown["text_offset"] == [0, 0, 1, 1]
    assert shown["tokens"] == ["<s>", "a", "<end>", "b"]


def test_of_tokens_with_one_name_the_likeliest_is_shown():
    top = ((97, -0.5), (1, -0.75))
    form = CompletionLogprobs(lambda token_id: b"x", Detokenizer(Vocabulary), 2)
    [entry] = form.add([ScoredToken(2, -3.0, top)])["top_logprobs"]
    assert entry == {"x": -0.5}


def test_parts_of_characters_are_shown_by_their_bytes():
    scores = [ScoredToken(0xC3, -1.0)]
    assert writer().add(scores)["tokens"] == ["bytes:\\xc3"]
    [entry] = chat_logprobs(scores, 0, token_bytes)["content"]
    assert (entry["token"], entry["bytes"]) == ("\\xc3", [0xC3])
    _, entries = prompt_logprobs(scores, 0, token_bytes)
    assert entries["195"]["decoded_token"] == "\ufffd"
