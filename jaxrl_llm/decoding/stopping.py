"""Stop strings: text grows token by token without breaking a character, and is searched as it grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text; bytes that don't form a character come out as U+FFFD."""

_REPLACEMENT = "\ufffd"
_WINDOW_TOKENS = 32  # a character has at most four bytes: a longer unfinished tail is not one, so let it go


class IncrementalText:
    """Decodes ids as they arrive; text that a later token may still change is held back.

    Only a short window is decoded again per token: from the last place where everything was complete, with the
    piece before it as context, since tokenizers join pieces (spaces) differently at the start of a text.
    """

    def __init__(self, decode: Decode):
        self._decode = decode
        self._ids: list[int] = []
        self._context = 0  # ids before this are done with
        self._complete = 0  # ids before this were complete when decoded
        self._emitted = 0  # characters after `_complete` already returned

    def push(self, token_id: int) -> str:
        """The text that becomes certain with this token; "" while a character is incomplete."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._context : self._complete])
        text = self._decode(self._ids[self._context :])[len(before) :]
        certain = text.rstrip(_REPLACEMENT)
        new = certain[self._emitted :]
        if certain == text or len(self._ids) - self._complete > _WINDOW_TOKENS:
            new = text[self._emitted :]
            self._context, self._complete, self._emitted = self._complete, len(self._ids), 0
        else:
            self._emitted = max(self._emitted, len(certain))
        return new


class StopStrings:
    """Watches one response for the first of several stop strings.

    Attributes:
      text: the certain text so far, cut before the stop string once one was found.
      matched: the stop string that was found, or None.
      longest: characters of the longest stop string.
    """

    def __init__(self, stop: Sequence[str], decode: Decode, min_tokens: int = 0):
        self._stop = tuple(stop)
        self.longest = max(len(text) for text in self._stop)
        self._incremental = IncrementalText(decode)
        self._min_tokens = min_tokens
        self._tokens = 0
        self.text = ""
        self.matched: str | None = None

    def push(self, token_id: int) -> bool:
        """Takes the next token; True when it completes a stop string (the earliest in the text wins).

        Tokens before ``min_tokens`` never complete one, and a string completed there is not found later.
        """
        self._tokens += 1
        searched = len(self.text)
        self.text += self._incremental.push(token_id)
        if self._tokens < self._min_tokens:
            return False
        matches = []
        for stop in self._stop:
            start = self.text.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0:
                matches.append((start, stop))
        if not matches:
            return False
        start, self.matched = min(matches, key=lambda match: match[0])
        self.text = self.text[:start]
        return True


class TextStream:
    """The text of a response as it grows, for someone who watches: nothing shown is ever taken back.

    Where stop strings are watched for, as much text as may still turn out to belong to one is held back.
    """

    def __init__(self, decode: Decode, watched: StopStrings | None = None):
        self._incremental = IncrementalText(decode)
        self._watched = watched
        self._seen = 0
        self._text = ""
        self._shown = 0

    def news(self, token_ids: Sequence[int]) -> str:
        """The text that became certain.

        Args:
          token_ids: the whole response so far; those seen before are not looked at again.
        """
        if self._watched is not None:
            self._text, held_back = self._watched.text, self._watched.longest - 1
        else:
            self._text += "".join(self._incremental.push(token) for token in token_ids[self._seen :])
            held_back = 0
        self._seen = len(token_ids)
        return self._show(self._text[: max(0, len(self._text) - held_back)])

    def rest(self, text: str) -> str:
        """What is still to be shown of a finished response whose text is ``text``."""
        return self._show(text)

    def _show(self, text: str) -> str:
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new
