import typing

import jax.numpy as jnp


class Correction(typing.NamedTuple):
    weights: typing.Any
    counted: dict
    maxima: dict


def correction(old, sampler, mask, segment_ids, **k):
    return Correction(jnp.ones_like(old), {}, {})
