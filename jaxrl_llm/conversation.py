"""Conversations with a model: each turn computes only what is new, the rest is found in the decoder's cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from jaxrl_llm.arguments import checked
from jaxrl_llm.data.prompts import encode_prompts, encode_text, render_prompt
from jaxrl_llm.errors import UserError
from jaxrl_llm.types import Completion, Example

if TYPE_CHECKING:
    from jaxrl_llm.trainer import Trainer


class Chat:
    """One conversation, begun by `jaxrl_llm.chat`, `RLTrainer.chat` or ``main generate --chat``.

    What the model wrote stays in the prompt token by token, as it wrote it, so that its cache is found whole; only
    where the chat template writes an earlier turn in another way (trims it, leaves reasoning out), or a stop string cut
    it, is the conversation encoded anew, and the cache found up to the first difference. Without a chat template the
    conversation is one text that grows. New weights are noticed: the next turn computes everything again.

    The decoder's pages and parameters in the generation layout stay in memory between turns, until the trainer takes a
    step, generates otherwise or is closed.

    What is drawn is fixed by the seed, the trainer's step and the number of the turn: two conversations that begin with
    the same turn have the same answer to it.

    Attributes:
      messages: the turns so far, ``{"role": …, "content": …}``, without the system prompt (``data.system_prompt``).

    Args:
      trainer: whose policy answers. Several conversations may share one, also in turns.
      own: whether `close` closes the trainer.
    """

    def __init__(self, trainer: Trainer, *, own: bool = False):
        trainer.algorithm.require_writer(trainer.options)
        self.trainer = trainer
        self._own = own
        self.reset()

    def reset(self) -> None:
        """Begins a new conversation; what the old one cached is still found where the new one begins alike."""
        self.messages: list[dict[str, str]] = []
        self._text = ""  # what the model has seen and written
        self._ids: np.ndarray | None = None  # its tokens, where they are known to be those of the text

    @checked
    def say(self, text: str, on_text: Callable[[str], None] | None = None) -> Completion:
        """The model's answer to the next turn, by the options of ``rollout``, one sample.

        Args:
          on_text: called with the new text as the answer grows.

        Raises:
          UserError: the turn is empty or no text, or the conversation has become longer than
            ``data.max_prompt_tokens``; it stands as it was before then.
        """
        if not isinstance(text, str) or not text:
            raise UserError(f"The turn is {text!r}: give a text that is not empty.")
        trainer = self.trainer
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt, ids = self._prompt(text, messages)
        limit = trainer.config.data.max_prompt_tokens
        if len(ids) > limit:
            raise UserError(
                f"The conversation has {len(ids)} tokens with this turn, more than data.max_prompt_tokens = {limit}. "
                "Begin a new one (Chat.reset), or raise the limit."
            )
        example = Example(
            uid=f"turn {len(messages)}@{trainer.step_index}",
            prompt=prompt,
            prompt_ids=ids,
            row=len(messages),  # every turn draws other numbers
            epoch=trainer.step_index,
        )
        ((completion,),) = trainer.rollout.complete(
            trainer.roles[trainer.main].whole,
            [example],
            step=trainer.step_index,
            samples=1,
            on_text=None if on_text is None else lambda _request, _sample, new: on_text(new),
            keep=True,
        )
        self.messages = [*messages, {"role": "assistant", "content": completion.text}]
        self._text = prompt + completion.text
        written = self._tokens_of_text(completion)
        self._ids = None if written is None else np.concatenate([ids, written])
        return completion

    def _prompt(self, text: str, messages: list[dict[str, str]]) -> tuple[str, np.ndarray]:
        """The whole conversation as text and as ids ``[t]`` int32."""
        tokenizer, data = self.trainer.tokenizer, self.trainer.config.data
        options = {"system_prompt": data.system_prompt, "apply_chat_template": data.apply_chat_template}
        _, templated = render_prompt(tokenizer, text, where="The turn", **options)
        prompt = self._text + text
        if templated:
            prompt, _ = render_prompt(tokenizer, messages, where="The conversation", **options)
        if self._ids is not None and prompt.startswith(self._text):
            new = encode_text(tokenizer, prompt[len(self._text) :], "The turn")
            return prompt, np.concatenate([self._ids, np.asarray(new, np.int32)])
        (ids,) = encode_prompts(tokenizer, [prompt], [templated], ["The conversation"])
        return prompt, ids

    def _tokens_of_text(self, completion: Completion) -> np.ndarray | None:
        """The tokens of the answer without the one that ended it, which the template writes; None where the text was
        cut within a token."""
        ids = completion.token_ids
        for kept in (ids[:-1], ids) if completion.finish_reason == "stop" else (ids,):
            decoded = self.trainer.tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            if decoded == completion.text:
                return kept
        return None

    def close(self) -> None:
        """Lets go of cache and parameters of the generation layout; closes a trainer that is its own."""
        self.trainer.rollout.forget()
        if self._own:
            self.trainer.close()

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
