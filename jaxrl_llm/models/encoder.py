"""BERT and RoBERTa classifiers (arXiv:1810.04805, arXiv:1907.11692): a text, or a pair of texts, to logits.

An :class:`Encoder` holds only its configuration and is hashable; parameters are a nested dict that its methods take::

    {'embed': {'word': [V, D], 'position': [P, D], 'type': [S, D], 'norm': {'scale', 'bias'}},
     'layers': {'q', 'k', 'v', 'o', 'up', 'down': {'weight': [L, in, out], 'bias': [L, out]},
                'attention_norm', 'mlp_norm': {'scale': [L, D], 'bias': [L, D]}},
     'dense': {'weight': [D, D], 'bias': [D]},        # BERT's pooler, RoBERTa's hidden layer of the head
     'out': {'weight': [D, C], 'bias': [C]}}

Each layer normalises after its sum (post-norm). The score is read from the first token: ``out(tanh(dense(x)))`` in
both, where BERT's ``dense`` was trained with the model and RoBERTa's with the head. Compute runs in the dtype of the
parameters; norms, softmax and the logits are in float32. There is no dropout: these models only score.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.labels import Labels
from jaxrl_llm.types import Params

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
"""By their name in a ``config.json``."""


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Shape and options of one encoder.

    Attributes:
      architecture: the Hugging Face class name, a key of ``ENCODERS`` (``encoder_loading.py``).
      positions: rows of the table of positions; RoBERTa's first ``pad_token_id + 1`` are never a token's.
      positions_skip_padding: RoBERTa's rule: position ``pad_token_id + 1`` is the first token that isn't padding, and
        padding tokens are at ``pad_token_id``. BERT counts columns from 0.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    positions: int
    type_vocab_size: int
    norm_eps: float
    activation: str
    pad_token_id: int
    positions_skip_padding: bool
    labels: Labels

    @property
    def max_position(self) -> int:
        """The longest text in tokens, special ones included."""
        return self.positions - (self.pad_token_id + 1 if self.positions_skip_padding else 0)


@dataclasses.dataclass(frozen=True)
class Encoder:
    """An encoder with a classification head; see the module for its parameters."""

    config: EncoderConfig

    def abstract_params(self) -> Params:
        """The parameters as ``jax.ShapeDtypeStruct``: nothing is allocated."""
        config = self.config
        width, wide, layers = config.hidden_size, config.intermediate_size, (config.num_layers,)

        def array(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        def linear(inputs: int, outputs: int, stack: tuple[int, ...] = ()) -> Params:
            return {"weight": array(*stack, inputs, outputs), "bias": array(*stack, outputs)}

        def norm(stack: tuple[int, ...] = ()) -> Params:
            return {"scale": array(*stack, width), "bias": array(*stack, width)}

        return {
            "embed": {
                "word": array(config.vocab_size, width),
                "position": array(config.positions, width),
                "type": array(config.type_vocab_size, width),
                "norm": norm(),
            },
            "layers": {
                **{name: linear(width, width, layers) for name in ("q", "k", "v", "o")},
                "up": linear(width, wide, layers),
                "down": linear(wide, width, layers),
                "attention_norm": norm(layers),
                "mlp_norm": norm(layers),
            },
            "dense": linear(width, width),
            "out": linear(width, len(config.labels.names)),
        }

    def logits(
        self,
        params: Params,
        tokens: Int[Array, "N T"],
        mask: Bool[Array, "N T"],
        token_types: Int[Array, "N T"] | None = None,
    ) -> Float[Array, "N C"]:
        """Float32 logits of each text, one text (or pair) in a row, its first token in column 0.

        Args:
          tokens: padding holds ``config.pad_token_id``.
          mask: True at a text's own tokens; no token sees the others.
          token_types: 0 in the first text of a pair, 1 in the second; None is all 0.
        """
        x = self._embed(params["embed"], tokens, token_types)
        bias = jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min)[:, None, None, :]
        layer = functools.partial(self._layer, bias=bias)
        x, _ = jax.lax.scan(lambda x, layer_params: (layer(x, layer_params), None), x, params["layers"])
        pooled = jnp.tanh(_linear(x[:, 0], params["dense"]).astype(jnp.float32)).astype(x.dtype)
        out = params["out"]
        logits = jnp.einsum("nd,dc->nc", pooled, out["weight"], preferred_element_type=jnp.float32)
        return logits + out["bias"].astype(jnp.float32)[None]

    def _embed(
        self, params: Params, tokens: Int[Array, "N T"], token_types: Int[Array, "N T"] | None
    ) -> Float[Array, "N T D"]:
        config = self.config
        if config.positions_skip_padding:
            real = (tokens != config.pad_token_id).astype(jnp.int32)
            positions = jnp.cumsum(real, axis=1) * real + config.pad_token_id
        else:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        types = jnp.zeros_like(tokens) if token_types is None else token_types
        word, kind, position = (
            jnp.take(params[name], ids, axis=0, mode="clip")
            for name, ids in (("word", tokens), ("type", types), ("position", positions))
        )
        return self._norm(word + kind + position, params["norm"])

    def _layer(self, x: Float[Array, "N T D"], params: Params, bias: Float[Array, "N 1 1 T"]) -> Float[Array, "N T D"]:
        heads = self.config.num_heads
        q, k, v = (_linear(x, params[name]).reshape(*x.shape[:2], heads, -1) for name in ("q", "k", "v"))
        scores = jnp.einsum("nihd,njhd->nhij", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(scores + bias, axis=-1).astype(x.dtype)
        attended = jnp.einsum("nhij,njhd->nihd", weights, v).reshape(x.shape)
        x = self._norm(x + _linear(attended, params["o"]), params["attention_norm"])
        wide = ACTIVATIONS[self.config.activation](_linear(x, params["up"]))
        return self._norm(x + _linear(wide, params["down"]), params["mlp_norm"])

    def _norm(self, x: Float[Array, "N T D"], params: Params) -> Float[Array, "N T D"]:
        value = x.astype(jnp.float32)
        value = value - jnp.mean(value, axis=-1, keepdims=True)
        value = value * jax.lax.rsqrt(jnp.mean(value * value, axis=-1, keepdims=True) + self.config.norm_eps)
        scale, bias = (params[name].astype(jnp.float32)[None, None] for name in ("scale", "bias"))
        return (value * scale + bias).astype(x.dtype)


def _linear(x: Float[Array, "*n I"], params: Params) -> Float[Array, "*n O"]:
    return x @ params["weight"] + params["bias"].reshape((1,) * (x.ndim - 1) + (-1,))


def encoder_scores(
    encoder: Encoder,
    params: Params,
    tokens: Int[Array, "N T"],
    mask: Bool[Array, "N T"],
    token_types: Int[Array, "N T"] | None = None,
    *,
    label: int | None = None,
    output: str = "logit",
) -> Float[Array, " N"]:
    """One float32 score per text: of the label and as the output that ``Labels.scores`` describes.

    Other arguments are those of :meth:`Encoder.logits`.

    Raises:
      UserError: the model has several labels and none is chosen, or one that it doesn't have.
    """
    encoder.config.labels.check(label, output)
    return encoder.config.labels.scores(encoder.logits(params, tokens, mask, token_types), label, output)
