"""Between callers and the scheduler: requests are checked and become samples; finished samples get their text."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxrl_llm.decoding.request import Request
from jaxrl_llm.decoding.rows import MAX_STOP_IDS
from jaxrl_llm.decoding.sample import Sample
from jaxrl_llm.decoding.stopping import StopStrings, TextStream
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.types import Completion


class Intake:
    """See the module.

    Attributes:
      context: most tokens of prompt and response together.
      num_tokens: ids below it can be sampled: the tokenizer's, which may be fewer than the model's.
    """

    def __init__(self, config: ModelConfig, tokenizer: Any, context: int | None):
        self._tokenizer = tokenizer
        self._eos_ids = config.end_ids(tokenizer)
        self._vocab_size = config.vocab_size
        self.num_tokens = config.vocab_size
        if tokenizer is not None:  # tokens that were added may lie behind a gap
            last = max(tokenizer.added_tokens_decoder, default=0)
            self.num_tokens = min(max(len(tokenizer), last + 1), config.vocab_size)
        longest = config.max_position
        if config.rope.type == "dynamic":  # beyond it, frequencies change with length and old keys would not fit
            longest = min(longest, config.rope.original_max_position)
        self.context = longest if context is None else context
        if not 2 <= self.context <= longest:
            raise UserError(
                f"The context of generation (prompt and response together) is {self.context} tokens; this model allows "
                f"2 to {longest}. Shorten data.max_prompt_tokens or rollout.max_new_tokens."
            )
        # A special token never shows in decoded text, so as a stop string it is watched for by its id.
        added = {} if tokenizer is None else tokenizer.added_tokens_decoder
        self._special_ids = {str(token): index for index, token in added.items() if token.special}

    def samples(self, index: int, request: Request) -> list[Sample]:
        """The samples of the index-th request, unscheduled.

        Raises:
          UserError: the request can't be served.
        """
        prompt = np.asarray(request.prompt_ids)
        if prompt.ndim != 1 or not len(prompt):
            raise UserError(f"Request {index} has a prompt of shape {prompt.shape}; it must be [t] with t at least 1.")
        if prompt.dtype.kind not in "iu" or prompt.min() < 0 or prompt.max() >= self._vocab_size:
            raise UserError(
                f"Request {index} has a prompt of {prompt.dtype} numbers from {prompt.min()} to {prompt.max()}; they "
                f"must be token ids, whole numbers from 0 to {self._vocab_size - 1}, the last of the model's "
                "vocabulary. Use the tokenizer that belongs to the model."
            )
        prompt = prompt.astype(np.int32)
        if len(prompt) >= self.context:
            raise UserError(
                f"Request {index} has a prompt of {len(prompt)} tokens, which leaves no room for a response in a "
                f"context of {self.context}. Shorten or filter prompts (data.max_prompt_tokens, data.overlong_prompts)."
            )
        seeds = np.asarray(request.seeds)
        if seeds.ndim != 2 or seeds.shape[1] != 2 or seeds.dtype != np.uint32:
            raise UserError(
                f"Request {index} has seeds of shape {seeds.shape} and type {seeds.dtype}; they must be uint32 [n, 2], "
                "one key per sample (see sample_seeds)."
            )
        sampling = request.sampling
        special = [self._special_ids[text] for text in sampling.stop if text in self._special_ids]
        strings = [text for text in sampling.stop if text not in self._special_ids]
        if strings and self._tokenizer is None:
            raise UserError(
                f"Request {index} has the stop strings {strings}, which need text, but there is no tokenizer. "
                "Give one, or use stop_token_ids."
            )
        eos = () if sampling.ignore_eos else self._eos_ids
        stop_ids = tuple(dict.fromkeys([*eos, *sampling.stop_token_ids, *special]))
        if len(stop_ids) > MAX_STOP_IDS:
            raise UserError(
                f"Request {index} ends at any of {len(stop_ids)} token ids (end-of-sequence ids included); at most "
                f"{MAX_STOP_IDS} are possible. Use fewer stop_token_ids."
            )
        return [
            Sample(
                request=index,
                index=number,
                prompt=prompt,
                sampling=sampling,
                seed=seed,
                max_tokens=min(sampling.max_tokens, self.context - len(prompt)),
                stop_ids=stop_ids,
                stop_strings=StopStrings(strings, self._decode, sampling.min_tokens) if strings else None,
            )
            for number, seed in enumerate(seeds)
        ]

    def stream(self, sample: Sample) -> TextStream:
        """What shows the sample's text as it grows.

        Raises:
          UserError: there is no tokenizer.
        """
        if self._tokenizer is None:
            raise UserError("Text can't be shown as it is generated: there is no tokenizer. Give one to the engine.")
        return TextStream(self._decode, sample.stop_strings)

    def completion(self, sample: Sample) -> Completion:
        """A finished sample as the caller gets it."""
        return Completion(
            token_ids=np.asarray(sample.tokens, np.int32),
            logprobs=np.asarray(sample.logprobs, np.float32),
            text=self._text(sample),
            finish_reason=sample.finish_reason,
            time_s=sample.finished_s - sample.started_s,
        )

    def _text(self, sample: Sample) -> str:
        if self._tokenizer is None:
            return ""
        if sample.stop_strings is not None and sample.stop_strings.matched is not None:
            return sample.stop_strings.text
        ended_by_id = sample.finish_reason == "stop"
        return self._decode(sample.tokens[:-1] if ended_by_id else sample.tokens)

    def _decode(self, ids: Any) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
