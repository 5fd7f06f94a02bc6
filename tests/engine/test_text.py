"""Text as it comes: the pieces add up to the whole, whatever the tokens cut in two; stop strings never show."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynaexq.engine.text import AnswerText, StopFinder, TextDecoder


def decode(tokens: list[int]) -> str:
    """A byte-level tokenizer without merges."""
    return bytes(tokens).decode("utf-8", errors="replace")


@given(st.text(max_size=40), st.text(max_size=5))
def test_pieces_add_up_to_the_text(text: str, before: str) -> None:
    decoder = TextDecoder(decode, list(before.encode()))
    pieces = [decoder.add(byte) for byte in text.encode()]
    assert "".join(pieces) + decoder.finish() == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_half_a_character_is_shown_at_the_end_only() -> None:
    decoder = TextDecoder(decode)
    assert [decoder.add(byte) for byte in "é€".encode()[:-1]] == ["", "é", "", ""]
    assert decoder.finish() == "\ufffd"


def test_bytes_that_never_become_a_character_are_not_held_for_ever() -> None:
    decoder = TextDecoder(decode)
    assert "\ufffd" in "".join(decoder.add(0x80) for _ in range(100))


STOPS = st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3)


@given(st.lists(st.text("ab.", max_size=3), max_size=20), STOPS)
def test_what_is_shown_is_what_is_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    finder, shown = StopFinder(stops), ""
    for piece in pieces:
        shown += finder.add(piece)
        if finder.found is not None:
            break
        assert all(stop not in shown for stop in stops)
    if finder.found is None:
        shown += finder.finish()
    whole = "".join(pieces)
    places = [place for stop in stops if (place := whole.find(stop)) >= 0]
    if finder.found is None:
        assert not places and shown == whole
    else:
        assert whole.startswith(shown + finder.found)
        assert all(stop not in shown for stop in stops)


def test_an_answer_stops_in_the_middle_of_a_token() -> None:
    words = ["one ", "two th", "ree four", " five"]
    answer = AnswerText(lambda tokens: "".join(words[token] for token in tokens), [], ["three"])
    assert [answer.add(token) for token in range(3)] == ["one ", "two ", ""]
    assert answer.stopped == "three" and answer.add(3) == "" and answer.finish() == ""


def test_what_looked_like_a_stop_string_is_shown_at_the_end() -> None:
    answer = AnswerText(decode, [], ["END"])
    assert "".join(answer.add(byte) for byte in b"the EN") == "the "
    assert answer.finish() == "EN" and answer.stopped is None
