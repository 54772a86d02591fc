"""What a caller asks the decoder for: a prompt, how to sample, and one random key per sample."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrl_llm.errors import UserError


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the samples of one request are drawn. Every field may differ per request without a compile.

    Attributes:
      temperature: divides the logits; 0 is greedy (lowest id on ties).
      top_k: keep the k most likely tokens (ties at the border are all kept); 0 is off.
      top_p: keep the smallest set of most likely tokens with at least this mass, after top_k; 1 is off.
      min_p: keep tokens at least this fraction of the most likely token's probability; 0 is off.
      max_tokens: most tokens in the response, the end-of-sequence token included.
      min_tokens: no end-of-sequence id, stop id or stop string ends the response before this many tokens.
      stop: strings that end the response. The tokens up to the one that completes the string are kept, its
        text and what follows is not.
      stop_token_ids: ids that end the response, beside the end-of-sequence ids of model and tokenizer.
      ignore_eos: the end-of-sequence ids don't end the response; ``stop`` and ``stop_token_ids`` do.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 64
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        # Written so that NaN fails every check.
        _require(0.0 <= self.temperature < float("inf"), "temperature", self.temperature, "0 (greedy) or more")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1 (off)")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "between 0 (off) and 1")
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "between 0 and max_tokens")
        _require(not isinstance(self.stop, str), "stop", self.stop, "a tuple of strings, not one string")
        _require(all(self.stop), "stop", self.stop, "non-empty strings")


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and the samples wanted of it (a group).

    Attributes:
      prompt_ids: token ids ``[t]``, at least one.
      sampling: how to draw them.
      seeds: ``uint32 [n, 2]``, one key per sample, n being the number of samples; see :func:`sample_seeds`.
    """

    prompt_ids: np.ndarray
    sampling: SamplingParams
    seeds: np.ndarray


def sample_seeds(seed: int, step: int, prompt_key: int, n: int) -> np.ndarray:
    """Keys ``uint32 [n, 2]`` of the n samples of a prompt.

    Sample j's key depends on (seed, step, prompt_key, j) alone: not on n, nor on which slot, batch or device
    decodes it. With the position in the response it fixes every random draw.

    Args:
      seed: the run's seed; all four numbers are non-negative.
      step: training step, or any number that tells one call from another.
      prompt_key: tells prompts apart, such as the row's index in its file.
    """
    keys = [np.random.SeedSequence([seed, step, prompt_key, sample]).generate_state(2) for sample in range(n)]
    return np.asarray(keys, np.uint32).reshape(n, 2)


def _require(holds: bool, name: str, value, allowed: str) -> None:
    if not holds:
        raise UserError(f"Sampling option {name} is {value!r}; it must be {allowed}.")
