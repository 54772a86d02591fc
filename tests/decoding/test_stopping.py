"""Stop strings across token borders and characters across tokens."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.decoding.stopping import IncrementalText, StopStrings, TextStream


def pieces(*texts):
    return lambda ids: "".join(texts[i] for i in ids)


def bytes_of(table):
    return lambda ids: b"".join(table[i] for i in ids).decode("utf-8", "replace")


def test_stop_across_tokens():
    """T19. Seen to catch: looking in the newest token only."""
    texts = ["Hel", "lo\nOb", "serva", "tion: x", " y"]
    stop = StopStrings(["\nObservation:"], pieces(*texts))
    assert [stop.push(i) for i in range(4)] == [False, False, False, True]
    assert (stop.text, stop.matched) == ("Hello", "\nObservation:")
    near_miss = StopStrings(["\nObservation:"], pieces("a\nObs", "erver: b"))
    assert not near_miss.push(0) and not near_miss.push(1) and near_miss.matched is None


def test_characters_of_several_tokens():
    """T23. Seen to catch: returning the replacement character at once."""
    table = [bytes([240, 159]), bytes([152, 128]), bytes([195]), bytes([169])]
    text = IncrementalText(bytes_of(table))
    assert [text.push(i) for i in range(4)] == ["", "😀", "", "é"]
    stop = StopStrings(["é"], bytes_of(table))
    assert [stop.push(i) for i in range(4)] == [False, False, False, True]
    assert stop.text == "😀"


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.data())
def test_pieces_add_up_to_the_text(text, data):
    """Any text cut into byte tokens anywhere. Seen to catch: dropping the certain part before a held-back tail;
    returning it twice."""
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=len(raw)))) if raw else []
    table = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True) if b > a]
    incremental = IncrementalText(bytes_of(table))
    certain = "".join(incremental.push(i) for i in range(len(table)))
    # Replacement characters at the very end may still change, so they stay back.
    assert text.startswith(certain) and set(text[len(certain) :]) <= {"\ufffd"}


def test_earliest_match_wins():
    """Seen to catch: the first listed stop string winning over an earlier one in the text."""
    stop = StopStrings(["d", "bc"], pieces("abcd"))
    assert stop.push(0) and (stop.text, stop.matched) == ("a", "bc")


def test_min_tokens_holds_stop_strings_back():
    """Seen to catch: min_tokens applied to ids only."""
    stop = StopStrings(["x"], pieces("x", "yx"), min_tokens=2)
    assert not stop.push(0)
    assert stop.push(1) and stop.text == "xy"


def test_long_broken_tail_is_let_go():
    """Bytes that never form a character are decoded in bounded windows. Seen to catch: a window that grows."""
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return "\ufffd" * len(ids)

    text = IncrementalText(decode)
    assert len("".join(text.push(0) for _ in range(500))) > 400
    assert longest < 100


def test_a_stream_shows_all_and_takes_nothing_back():
    """Dispatches of any length, with and without a stop string whose beginning may turn out to be text. Seen to catch:
    text shown that then was part of the stop string; held back text never shown."""
    texts = ["ab", "c E", "N", "x ", "END", " more"]
    decode = pieces(*texts)
    for stop, final in ((None, "abc ENx END more"), ("END", "abc ENx ")):
        for step in (1, 2, 3):
            watched = StopStrings([stop], decode) if stop else None
            stream, shown, ids = TextStream(decode, watched), "", []
            for begin in range(0, len(texts), step):
                for token in range(begin, min(begin + step, len(texts))):
                    ids.append(token)
                    if watched and watched.push(token):
                        break
                if watched and watched.matched:
                    break
                shown += stream.news(ids)
                assert final.startswith(shown)
            assert shown + stream.rest(final) == final


def test_a_stream_holds_back_all_of_a_text_shorter_than_the_stop_string():
    """Caught: a negative end of the slice, which shows the beginning of what then was the stop string."""
    decode = pieces("ab", " EN", "D!!!!")
    watched = StopStrings([" END!!!!"], decode)
    stream, shown = TextStream(decode, watched), ""
    for token in range(3):
        watched.push(token)
        shown += stream.news(range(token + 1))
        assert "ab".startswith(shown)
    assert shown + stream.rest(watched.text) == "ab"
