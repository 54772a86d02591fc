"""A linear head that reads one number from each hidden state: the critic's value, or a reward model's score.

Its parameters are the decoder's (see ``decoder.py``) without ``lm_head``, and::

    {'value_head': {'weight': [D]}}

There is no bias, since the ``*ForSequenceClassification`` models of Hugging Face, which these weights are written as
and read from (``classifier.py``), have none. A new head is zero: values start at 0, so the first advantages are those
without a critic, and the decoder below gets no gradient from random directions. The head itself does (its gradient is
the hidden state), so nothing stays at zero.

Alignment: ``token_values[:, t]`` is the value of the state *after* token t. The value V(s_t) of the state in which
token t was chosen sits where that token is predicted: one column earlier, or, in packed rows that share a prompt, in
column ``rows.predictors``::

    state_values = jnp.take_along_axis(values, rows.predictors, axis=1)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models import arrangement
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.placement import place
from jaxrl_llm.types import Params


def abstract_value_params(decoder: Decoder) -> Params:
    """The parameters of a decoder with a value head as ``jax.ShapeDtypeStruct``: nothing is allocated."""
    head = jax.ShapeDtypeStruct((decoder.config.hidden_size,), jnp.float32)
    return {**_body(decoder.abstract_params()), "value_head": {"weight": head}}


def value_axes(decoder: Decoder) -> Params:
    """The same tree with each parameter's tuple of logical axes; the head is whole on every device."""
    return arrangement.axes_of(abstract_value_params(decoder), arrangement.AXES)


def add_value_head(decoder: Decoder, params: Params) -> Params:
    """A decoder's parameters with a new head, in their dtype; the other arrays are shared with ``params``."""
    embedding = params["embed"]["weight"]
    whole = None
    if not isinstance(embedding, Tracer) and isinstance(embedding.sharding, NamedSharding):
        whole = NamedSharding(embedding.sharding.mesh, PartitionSpec())
    weight = jnp.zeros((decoder.config.hidden_size,), embedding.dtype, device=whole)
    return {**_body(params), "value_head": {"weight": weight}}


def _body(params: Params) -> Params:
    return {name: value for name, value in params.items() if name != "lm_head"}


def token_values(params: Params, hidden: Float[Array, "R T D"]) -> Float[Array, "R T"]:
    """Value of the state after each token, float32; ``hidden`` is what ``Decoder.hidden`` returns.

    Padding columns have a value too: mask them.
    """
    values = jnp.einsum("rtd,d->rt", hidden, params["value_head"]["weight"], preferred_element_type=jnp.float32)
    return place(values, "rows", None)


def last_columns(tokens: Int[Array, "N T"], mask: Bool[Array, "N T"], pad_token_id: int | None) -> Int[Array, " N"]:
    """The column at which a text is scored: its last token that is not ``pad_token_id``; 0 where there is none.

    As transformers has it, so a text that itself ends in the padding token (where that is the end of sequence, say)
    is scored before it. With None it is the text's last token, whatever it is.
    """
    counts = mask if pad_token_id is None else mask & (tokens != pad_token_id)
    columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    return jnp.max(jnp.where(counts, columns, 0), axis=1)


def text_scores(
    params: Params,
    hidden: Float[Array, "N T D"],
    tokens: Int[Array, "N T"],
    mask: Bool[Array, "N T"],
    pad_token_id: int | None = None,
) -> Float[Array, " N"]:
    """The score of each text, float32: its value at the column that :func:`last_columns` names.

    Args:
      mask: True at a text's own tokens, one text in a row.
    """
    columns = last_columns(tokens, mask, pad_token_id)
    return jnp.take_along_axis(token_values(params, hidden), columns[:, None], axis=1)[:, 0]
