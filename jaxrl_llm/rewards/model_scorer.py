"""Scores completions with a reward model: a decoder or encoder classifier in Hugging Face's format, on the devices."""

from __future__ import annotations

import bisect
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_llm import processes, turns
from jaxrl_llm.data.columns import Messages
from jaxrl_llm.data.tokenizer import load_tokenizer
from jaxrl_llm.decoding.buckets import growing
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.classifier import CLASSIFIERS, END_TOKEN, architecture_of, load_classifier
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.encoder import Encoder, EncoderConfig
from jaxrl_llm.models.encoder_loading import ENCODERS, encoder_config, load_encoder
from jaxrl_llm.models.labels import Labels
from jaxrl_llm.models.loading import read_hf_config, resolve_path
from jaxrl_llm.models.registry import config_from_hf
from jaxrl_llm.models.value_head import last_columns
from jaxrl_llm.rewards.score_inputs import ScoreInput, choose_template, score_inputs
from jaxrl_llm.sharding import TRAINING, batch_sharding, batch_shards, replicated
from jaxrl_llm.types import Params

log = logging.getLogger(__name__)

SMALLEST_TOKENS = 32
"""The shortest row; longer ones double."""


class ModelScorer:
    """A loaded reward model with its own tokenizer.

    The folder's ``config.json`` says what it is: ``CLASSIFIERS`` are decoders, scored at the last token, ``ENCODERS``
    are BERT-style and scored at the first. Nothing that comes with a model is run.

    Args:
      path: a folder or hub id.
      max_tokens: of a text, prompt, completion and special tokens together; see ``score_inputs`` for what is cut.
      batch_tokens: padded tokens that are scored at once (one text at least, per shard of ``mesh``).
      template: how prompt and completion become one text: ``auto``, ``chat``, ``pair`` or ``concat``.
      output: ``logit`` or ``probability``; see ``Labels.scores``.
      label: index of the label that is the reward, for models with several.
      dtype: of the parameters and the compute; scores are float32 always.
      mesh: where it runs: a decoder's parameters in the training layout, an encoder's on every device, rows split over
        data and fsdp. None is the default device.

    Attributes:
      metrics: of the last call: ``texts``, ``tokens`` (without padding), ``cut_prompts`` and ``cut_completions`` (how
        many lost a part to ``max_tokens``), and ``failures`` (scores that were NaN or infinite).
      shapes: every ``(rows, tokens)`` that can ever be compiled.

    Raises:
      UserError: no such model, not one that is supported, or an option that it doesn't have.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_tokens: int = 0,
        batch_tokens: int = 8192,
        template: str = "auto",
        output: str = "logit",
        label: int | None = None,
        dtype: DTypeLike = jnp.float32,
        mesh: Mesh | None = None,
    ):
        local = resolve_path(path)
        hf = read_hf_config(local)
        if max_tokens < 0 or batch_tokens < 1:
            raise UserError(
                f"The reward model has max_tokens = {max_tokens} and batch_tokens = {batch_tokens}; they must be at "
                "least 0 and 1."
            )
        shape, max_tokens = scoring_shape(hf, str(path), max_tokens)
        is_encoder = isinstance(shape, EncoderConfig)
        labels = Labels.from_hf(hf)
        labels.check(label, output)
        self._tokenizer = load_tokenizer(local)
        self._template = choose_template(self._tokenizer, template, is_encoder=is_encoder)
        end = hf.get(END_TOKEN)
        self._end_token_id = end if isinstance(end, int) else None
        self._uses_types = False
        if is_encoder:
            model, self._params = load_encoder(local, sharding=None if mesh is None else replicated(mesh), dtype=dtype)
            takes_types = "token_type_ids" in self._tokenizer.model_input_names
            self._uses_types = takes_types and model.config.type_vocab_size > 1
        else:
            model, self._params = load_classifier(
                local,
                mesh=mesh,
                layout=None if mesh is None else TRAINING,
                dtype=dtype,
                vocab_multiple=1 if mesh is None else mesh.shape["tensor"],
                several_labels=True,
            )
        self._scores = scores_program(model, labels, label, output, mesh)
        self._config, self._mesh, self._max_tokens = model.config, mesh, max_tokens
        self._rows = batch_shapes(max_tokens, batch_tokens, 1 if mesh is None else batch_shards(mesh))
        self.shapes = tuple((rows, tokens) for tokens, sizes in self._rows.items() for rows in sizes)
        self.metrics: dict[str, float] = {}
        self._told_of_cuts = False

    def score(self, prompts: Sequence[str | Messages], completions: Sequence[str]) -> np.ndarray:
        """The score of each completion to its prompt, float32 ``[N]``; NaN where the model's was NaN or infinite.

        Prompts are as they were before any template of the policy: plain text, or a chat. Completions may be empty.
        The same call gives the same bits; in another company a text's score may differ by rounding. In a run of
        several processes each must make the same call, and gets all scores.

        Raises:
          UserError: see ``score_inputs``; or the tokenizer has ids beyond the model's vocabulary.
        """
        if len(prompts) != len(completions):
            raise ValueError(f"{len(prompts)} prompts and {len(completions)} completions: one of each is needed")
        inputs = score_inputs(
            self._tokenizer,
            prompts,
            completions,
            template=self._template,
            max_tokens=self._max_tokens,
            end_token_id=self._end_token_id,
        )
        self._check_ids(inputs)
        scores = np.full(len(inputs), np.nan, np.float32)
        pending = [
            (chosen, self._run(shape, [inputs[index] for index in chosen])) for shape, chosen in self._plan(inputs)
        ]
        for chosen, values in pending:  # all are dispatched before the first is waited for
            with turns.waiting():
                scores[chosen] = np.asarray(jax.device_get(values))[: len(chosen)]
        scores[~np.isfinite(scores)] = np.nan
        self._count(inputs, scores)
        return scores

    def warm_up(self) -> int:
        """Compiles every shape, so that no later call does; how many there are."""
        empty = ScoreInput(np.zeros(1, np.int32), np.zeros(1, np.int32))
        for shape in self.shapes:
            jax.block_until_ready(self._run(shape, [empty]))
        return len(self.shapes)

    def _plan(self, inputs: Sequence[ScoreInput]) -> Iterator[tuple[tuple[int, int], list[int]]]:
        """Shapes and the texts in them: by length, in the fewest rows that hold them."""
        sizes = tuple(self._rows)
        by_tokens: dict[int, list[int]] = {tokens: [] for tokens in sizes}
        for index, entry in enumerate(inputs):
            by_tokens[sizes[bisect.bisect_left(sizes, len(entry.token_ids))]].append(index)
        for tokens, indices in by_tokens.items():
            rows = self._rows[tokens]
            for start in range(0, len(indices), rows[-1]):
                chosen = indices[start : start + rows[-1]]
                yield (rows[bisect.bisect_left(rows, len(chosen))], tokens), chosen

    def _run(self, shape: tuple[int, int], inputs: Sequence[ScoreInput]) -> Array:
        """Dispatches one batch, ``[rows]`` float32; rows beyond the inputs mean nothing."""
        tokens = np.full(shape, self._config.pad_token_id or 0, np.int32)
        types = np.zeros(shape, np.int32)
        lengths = np.zeros(shape[0], np.int32)
        for row, entry in enumerate(inputs):
            lengths[row] = len(entry.token_ids)
            tokens[row, : lengths[row]] = entry.token_ids
            if self._uses_types:
                types[row, : lengths[row]] = entry.token_types
        arrays = (tokens, types, lengths)
        if self._mesh is None:
            return self._scores(self._params, *jax.device_put(arrays))
        placed = [processes.put(array, batch_sharding(self._mesh, array.ndim)) for array in arrays]
        with jax.set_mesh(self._mesh):
            return self._scores(self._params, *placed)

    def _check_ids(self, inputs: Sequence[ScoreInput]) -> None:
        largest = max((int(entry.token_ids.max(initial=0)) for entry in inputs), default=0)
        if largest >= self._config.vocab_size:
            raise UserError(
                f"The reward model's tokenizer gives the token id {largest}, but its model has "
                f"{self._config.vocab_size} tokens. The tokenizer in its folder belongs to another model."
            )

    def _count(self, inputs: Sequence[ScoreInput], scores: np.ndarray) -> None:
        counts = {
            "texts": len(inputs),
            "tokens": sum(len(entry.token_ids) for entry in inputs),
            "cut_prompts": sum(entry.cut_prompt_tokens > 0 for entry in inputs),
            "cut_completions": sum(entry.cut_completion_tokens > 0 for entry in inputs),
            "failures": int(np.isnan(scores).sum()),
        }
        self.metrics = {name: float(value) for name, value in counts.items()}
        if counts["failures"]:
            log.warning(
                "the reward model gave no finite score for %d of %d texts; they count as failures",
                counts["failures"],
                len(inputs),
            )
        if counts["cut_prompts"] and not self._told_of_cuts:
            self._told_of_cuts = True
            log.warning(
                "%d of %d texts are longer than the reward model's max_tokens = %d: the beginning of their prompts is "
                "left out (told once; see the metric cut_prompts)",
                counts["cut_prompts"],
                len(inputs),
                self._max_tokens,
            )


def scoring_shape(hf: dict[str, Any], source: str, max_tokens: int) -> tuple[ModelConfig | EncoderConfig, int]:
    """The shape that the ``config.json`` of a reward model names, and the most tokens of a text, where 0 was given too.

    Raises:
      UserError: one that can't score, or that can't read so many tokens; ``source`` names it.
    """
    architecture = architecture_of(hf)
    if architecture not in CLASSIFIERS and architecture not in ENCODERS:
        raise UserError(
            f"The reward model {source!r} has the architecture {architecture!r}, which can't score a text here; "
            f"supported are {', '.join((*CLASSIFIERS, *ENCODERS))}. Choose a model of one of these."
        )
    if architecture in ENCODERS:
        shape = encoder_config(hf, source)
    else:
        shape = config_from_hf({**hf, "architectures": [CLASSIFIERS[architecture]]}, source)
    longest = shape.max_position
    if max_tokens > longest:
        raise UserError(
            f"reward_model.max_tokens is {max_tokens}, but {source!r} reads at most {longest} tokens. Lower it, or 0 "
            "for that."
        )
    return shape, max_tokens or min(longest, 1024)


def scores_program(
    model: Decoder | Encoder, labels: Labels, label: int | None, output: str, mesh: Mesh | None
) -> Callable[..., Array]:
    """The jitted ``scores(params, tokens, types, lengths) -> [N]``; arguments as `ModelScorer`'s."""
    logits = functools.partial(_encoder_logits if isinstance(model, Encoder) else _decoder_logits, model)

    def scores(params: Params, tokens: Array, types: Array, lengths: Array) -> Array:
        return labels.scores(logits(params, tokens, types, lengths), label, output)

    return jax.jit(scores, out_shardings=None if mesh is None else replicated(mesh))


def batch_shapes(max_tokens: int, batch_tokens: int, shards: int) -> dict[int, tuple[int, ...]]:
    """By the tokens of a row, the numbers of rows of a batch; both from the smallest to the largest."""
    return {
        tokens: growing(shards, max(batch_tokens // tokens // shards, 1) * shards, factor=4)
        for tokens in growing(SMALLEST_TOKENS, max_tokens, factor=2)
    }


def _decoder_logits(
    decoder: Decoder, params: Params, tokens: Int[Array, "N T"], types: Int[Array, "N T"], lengths: Int[Array, " N"]
) -> Float[Array, "N C"]:
    """The logits of each text, read where transformers reads them."""
    columns = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    mask = columns < lengths[:, None]
    hidden = decoder.hidden(params, tokens, columns, mask.astype(jnp.int32))
    last = last_columns(tokens, mask, decoder.config.pad_token_id)
    last_hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    weight = params["label_head"]["weight"] if "label_head" in params else params["value_head"]["weight"][None]
    return jnp.einsum("nd,cd->nc", last_hidden, weight, preferred_element_type=jnp.float32)


def _encoder_logits(
    encoder: Encoder, params: Params, tokens: Int[Array, "N T"], types: Int[Array, "N T"], lengths: Int[Array, " N"]
) -> Float[Array, "N C"]:
    mask = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    return encoder.logits(params, tokens, mask, types)
