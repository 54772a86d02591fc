"""A run's reward model with shapes in place of arrays, and what scoring a step takes."""

from __future__ import annotations

import bisect
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.config import RewardModelConfig
from jaxrl_llm.models import arrangement
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.encoder import Encoder, EncoderConfig
from jaxrl_llm.models.labels import Labels
from jaxrl_llm.models.loading import read_hf_config
from jaxrl_llm.models.locate import CONFIG_FILES, resolve_path
from jaxrl_llm.models.value_head import abstract_value_params
from jaxrl_llm.plan.abstract_roles import placed, with_shardings
from jaxrl_llm.plan.programs import Program
from jaxrl_llm.rewards.model_scorer import batch_shapes, scores_program, scoring_shape
from jaxrl_llm.sharding import batch_sharding, batch_shards, replicated
from jaxrl_llm.types import Params


@dataclasses.dataclass(frozen=True)
class PlannedScorer:
    """What `rewards.model_scorer.ModelScorer` loads and runs.

    Attributes:
      program: the scores of its largest batch of its longest texts.
      sizes: by the tokens of a row, the most rows of a batch.
    """

    shape: ModelConfig | EncoderConfig
    params: Params
    program: Program
    sizes: dict[int, int]

    @classmethod
    def of(cls, settings: RewardModelConfig, mesh: Mesh, dtype: Any) -> PlannedScorer:
        """From its ``config.json`` alone.

        Raises:
          UserError: it can't score, or not texts of that length.
        """
        hf = read_hf_config(resolve_path(settings.path, CONFIG_FILES))
        labels = Labels.from_hf(hf)
        label = None if settings.label < 0 else settings.label
        labels.check(label, settings.output)
        shape, longest = scoring_shape(hf, settings.path, settings.max_tokens)
        if isinstance(shape, EncoderConfig):
            model: Decoder | Encoder = Encoder(shape)
            shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), model.abstract_params())
            params = with_shardings(shapes, jax.tree.map(lambda _: replicated(mesh), shapes))
        else:
            model = Decoder(shape.with_vocab_multiple(mesh.shape["tensor"]))
            shapes = abstract_value_params(model)
            if len(labels.names) > 1:
                width = shapes.pop("value_head")["weight"].shape[0]
                weight = jax.ShapeDtypeStruct((len(labels.names), width), jnp.float32)
                shapes = {**shapes, "label_head": {"weight": weight}}
            params = placed(shapes, arrangement.axes_of(shapes, arrangement.AXES), dtype, mesh)
        rows = batch_shapes(longest, settings.batch_tokens, batch_shards(mesh))
        sizes = {tokens: numbers[-1] for tokens, numbers in rows.items()}
        batch = sizes[longest], longest
        texts = [
            jax.ShapeDtypeStruct(part, jnp.int32, sharding=batch_sharding(mesh, len(part)))
            for part in (batch, batch, batch[:1])
        ]
        function = scores_program(model, labels, label, settings.output, mesh)
        return cls(shape, params, Program(function, (params, *texts), mesh), sizes)

    def batches(self, texts: int, tokens: int) -> tuple[int, int]:
        """In how many batches so many texts are scored, and the padded tokens of all.

        Args:
          tokens: of a text, by the policy's tokenizer; the scorer's own may count others.
        """
        lengths = tuple(self.sizes)
        row = lengths[min(bisect.bisect_left(lengths, tokens), len(lengths) - 1)]
        return math.ceil(texts / self.sizes[row]), texts * row

    @property
    def layers(self) -> Params:
        return self.params["layers" if isinstance(self.shape, EncoderConfig) else "blocks"]

    def flops(self, tokens: int) -> float:
        """Of so many padded tokens in rows of the longest texts: matrices of layers and attention."""
        layers = sum(leaf.size for leaf in jax.tree.leaves(self.layers))
        return tokens * (2 * layers + 4 * self.shape.num_layers * self.shape.hidden_size * max(self.sizes) / 2)
