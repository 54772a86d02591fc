"""Two-operand addition as text, ``37+58=`` -> ``95``: a task small enough for a model trained from scratch.

The 5,050 unordered pairs of operands 0-99 are split once and for all, whatever the run's seed, so neither
order of an evaluation pair is ever trained on. The supervised rows teach a known mistake, forgetting every
carry, in four of five labels: greedy accuracy after imitation is the share of pairs that need no carry
(about 0.3), while the right answer keeps a fifth of the probability for reinforcement learning to find.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data.order import permutation

LARGEST_OPERAND = 99
EVALUATION_PAIRS = 256
WRONG_LABELS, RIGHT_LABELS = 4, 1  # supervised rows per ordered pair

SYMBOLS = ("<pad>", "<bos>", "<eos>", *"0123456789+-=")


@functools.cache
def _split() -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """(training, evaluation) as ordered pairs; both orders of an unordered pair are on the same side."""
    unordered = [(a, b) for a in range(LARGEST_OPERAND + 1) for b in range(a, LARGEST_OPERAND + 1)]
    shuffled = [unordered[i] for i in permutation(len(unordered), 20_090_731)]

    def both_orders(pairs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple(ordered for a, b in pairs for ordered in dict.fromkeys([(a, b), (b, a)]))

    return both_orders(shuffled[EVALUATION_PAIRS:]), both_orders(shuffled[:EVALUATION_PAIRS])


def add_without_carries(a: int, b: int) -> int:
    """Adds digit by digit and drops every carry, the last one too: 37 + 58 -> 85, 50 + 50 -> 0."""
    total, place = 0, 1
    while a or b:
        total += (a % 10 + b % 10) % 10 * place
        a, b, place = a // 10, b // 10, place * 10
    return total


def _wrong_sum(a: int, b: int) -> int:
    without = add_without_carries(a, b)
    return without if without != a + b else a + b + 10


def wrong_carries(a: int, b: int) -> list[int]:
    """The sums that get a carry wrong, into the tens, the hundreds or both: forgotten, or made up."""
    total = a + b
    ones, tens, hundreds = total % 10, total // 10 % 10, total // 100
    other_tens = (tens + (-1 if a % 10 + b % 10 >= 10 else 1)) % 10
    digits = [(tens, 1 - hundreds), (other_tens, hundreds), (other_tens, 1 - hundreds)]
    return [100 * hundred + 10 * ten + ones for ten, hundred in digits]


def addition_rows(split: str) -> list[dict[str, Any]]:
    """Rows of a split: columns prompt and answer, and

    - ``train``, ``eval``: no more;
    - ``sft``: completion, four of five wrong;
    - ``preferences``, ``preferences_eval``: chosen, the right answer, and rejected, one of `wrong_carries`: three rows
      a prompt;
    - ``labels``: completion and label, each prompt with its right answer (true) and the one whose carries are
      forgotten, or one made up where there is none (false).

    All but the ``eval`` ones are of the training pairs.
    """
    train, evaluation = _split()
    if split.startswith("preferences"):
        pairs = evaluation if split == "preferences_eval" else train
        return [
            {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(wrong)}
            for a, b in pairs
            for wrong in wrong_carries(a, b)
        ]
    if split == "labels":
        return [
            {"prompt": f"{a}+{b}=", "completion": str(total), "label": total == a + b}
            for a, b in train
            for total in (a + b, _wrong_sum(a, b))
        ]
    if split == "sft":
        labels = [add_without_carries] * WRONG_LABELS + [lambda a, b: a + b] * RIGHT_LABELS
        return [
            {"prompt": f"{a}+{b}=", "answer": str(a + b), "completion": str(label(a, b))}
            for a, b in train
            for label in labels
        ]
    pairs = {"train": train, "eval": evaluation}[split]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def write_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Writes the task's character tokenizer as an ordinary Hugging Face folder and returns it.

    16 ids: 0 padding, 1 beginning, 2 end of sequence, then ``0``-``9``, ``+``, ``-``, ``=``. Encoding adds one
    beginning-of-sequence id; there is no unknown token, so any other character raises in place of vanishing.
    """
    vocabulary = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer
