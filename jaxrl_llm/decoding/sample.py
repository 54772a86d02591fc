"""One response being made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.decoding.request import SamplingParams
from jaxrl_llm.decoding.stopping import StopStrings


@dataclasses.dataclass(eq=False)
class Sample:
    """One response being made.

    Attributes:
      request, index: position in the caller's list of requests, and in its group.
      max_tokens: most tokens in the response, the context limit included.
      stop_ids: ids that end it. ``stop_strings`` watches its text; None without stop strings.
      tokens, logprobs: the response so far.
      pages: pages it holds, in order; page i caches tokens ``i * page_size …``.
      finish_reason: "" while unfinished.
    """

    request: int
    index: int
    prompt: np.ndarray
    sampling: SamplingParams
    seed: np.ndarray
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    stop_strings: StopStrings | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str = ""
    started_s: float = -1.0
    finished_s: float = -1.0

    @property
    def position(self) -> int:
        """Position of the token to decode next, which is the number of tokens cached."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        """Most tokens that it can still make."""
        return self.max_tokens - len(self.tokens)

    @property
    def last_token(self) -> int:
        return self.tokens[-1] if self.tokens else int(self.prompt[-1])

    def cached_tokens(self) -> np.ndarray:
        """Every token but the last: what its cache must hold before it decodes."""
        return np.concatenate([self.prompt, np.asarray(self.tokens, self.prompt.dtype)])[:-1]

    def receive(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Takes newly decoded tokens, up to the one that ends the response; sets ``finish_reason`` then."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            self.tokens.append(int(token))
            self.logprobs.append(float(logprob))
            stopped = self.stop_strings is not None and self.stop_strings.push(int(token))
            if stopped or token in self.stop_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                return
