"""Draws one token per row, exactly, from (seed, position in the response) alone.

Method: inverse CDF on integers, in two levels. Probabilities become integer weights that sum to exactly 2**31,
first over chunks of 128 ids, then inside the chosen chunk; one random word picks at each level. Integer sums
are associative, so the drawn id does not depend on how a backend orders additions, and every id keeps its
probability to within 2**-31 of its chunk's (a float32 cumulative sum over a vocabulary is off by 7e-4 in total
variation and makes most rare ids unreachable). Nothing is sorted: top-k and top-p bisect on the bits of a
float, which for non-negative floats are ordered like the floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

CHUNK = 128
_TOTAL_BITS = 31  # a weight of the whole, 2**31, still fits an unsigned 32-bit integer


class SamplingRows(NamedTuple):
    """Sampling options of each row; see `request.SamplingParams` for their meaning.

    Attributes:
      generated: tokens of the response so far, which is the position of the one now drawn.
      stop_ids: ids that can't be drawn while ``generated < min_tokens``, padded with -1.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    seeds: UInt[Array, "B 2"]
    generated: Int[Array, " B"]
    min_tokens: Int[Array, " B"]
    stop_ids: Int[Array, "B E"]


def sample_tokens(
    logits: Float[Array, "B V"], rows: SamplingRows, *, num_tokens: int
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The next token of each row and its log-probability.

    Args:
      logits: float32, -inf where the model has no such id. NaN gives some id and a NaN log-probability.
      num_tokens: ids at or above it are never drawn (rows of the vocabulary without a token); they do count
        in the log-probability's normalisation.

    Returns:
      Tokens int32, and ``sampler_logprobs``: of the whole distribution at the row's temperature, before
      top-k, top-p, min-p and min_tokens; untempered where the temperature is 0.
    """
    # By id first: a decode step on CPUs makes its logits in this order, and chunks of them stay whole in any other.
    by_id = logits.T
    allowed = _pad(by_id[:num_tokens])
    greedy = rows.temperature == 0
    temperature = jnp.where(greedy, 1.0, rows.temperature)
    restricted = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0) | (rows.generated < rows.min_tokens)
    tokens, largest, total = jax.lax.cond(
        jnp.any(restricted), _draw_restricted, _draw_plain, allowed, temperature, greedy, rows
    )
    log_total = jnp.log(total)
    if num_tokens < logits.shape[1]:
        log_total = jnp.logaddexp(log_total, _log_total(by_id[num_tokens:], largest, temperature))
    chosen = jnp.take_along_axis(by_id, tokens[None, :], axis=0)[0]
    return tokens, (chosen - largest) / temperature - log_total


def _draw_plain(allowed, temperature, greedy, rows):
    """Token, largest logit and sum of exp((logit - largest) / temperature) without any filter."""
    largest, weights = _weights(allowed, temperature)
    return _draw(allowed, weights, greedy, rows), largest, weights.sum(0)


def _draw_restricted(allowed, temperature, greedy, rows):
    """As :func:`_draw_plain`, drawing only from what min_tokens, top-k, top-p and min-p leave."""
    largest, all_weights = _weights(allowed, temperature)
    early = rows.generated < rows.min_tokens
    ids = jnp.arange(allowed.shape[0], dtype=jnp.int32)
    stops = jnp.any(ids[:, None, None] == rows.stop_ids[None], axis=-1)
    open_logits = jnp.where(early[None, :] & stops, -jnp.inf, allowed)
    # Weights relative to what is left: the stop ids may have held all the mass that float32 can show.
    weights = _weights(open_logits, temperature)[1].T
    weights = jax.lax.cond(jnp.any(rows.top_k > 0), lambda w: keep_top_k(w, rows.top_k), lambda w: w, weights)
    weights = jax.lax.cond(jnp.any(rows.top_p < 1), lambda w: keep_top_p(w, rows.top_p), lambda w: w, weights)
    weights = keep_min_p(weights, rows.min_p).T
    return _draw(open_logits, weights, greedy, rows), largest, all_weights.sum(0)


def _draw(logits, weights, greedy, rows):
    sampled = draw_index(weights, random_words(rows.seeds, rows.generated))
    return jnp.where(greedy, argmax(logits), sampled)


def _weights(logits, temperature):
    """The largest logit and exp((logits - largest) / temperature): 1 at the most likely, never overflowing."""
    largest = _chunks(logits).max(1).max(0)
    return largest, jnp.exp((logits - largest[None, :]) / temperature[None, :])


def _log_total(logits, largest, temperature):
    scaled = (logits - largest[None, :]) / temperature[None, :]
    return jax.nn.logsumexp(scaled, axis=0)


# -- Filters: weights in, weights out; what is left out becomes 0 and at least one stays -------------------


def keep_top_k(weights: Float[Array, "B V"], top_k: Int[Array, " B"]) -> Float[Array, "B V"]:
    """The k largest weights of each row, and all that equal the k-th; rows with k = 0 keep everything."""
    bits = _ordered_bits(weights)
    wanted = jnp.clip(top_k, 1, weights.shape[1])
    threshold = _largest_threshold(bits, lambda t: jnp.sum(bits >= t[:, None], axis=-1) >= wanted)
    return jnp.where((top_k <= 0)[:, None] | (bits >= threshold[:, None]), weights, 0.0)


def keep_top_p(weights: Float[Array, "B V"], top_p: Float[Array, " B"]) -> Float[Array, "B V"]:
    """The smallest set of largest weights that holds the fraction ``top_p`` of the row's sum; of equal weights at its
    border those with the lowest ids."""
    bits = _ordered_bits(weights)
    wanted = top_p * weights.sum(-1)

    def holds(threshold):
        return jnp.where(bits >= threshold[:, None], weights, 0.0).sum(-1) >= wanted

    threshold = _largest_threshold(bits, holds)
    border = bits == threshold[:, None]
    missing = wanted - jnp.where(bits > threshold[:, None], weights, 0.0).sum(-1)
    value = jax.lax.bitcast_convert_type(threshold, jnp.float32)  # 0 if rounding keeps the sum below what is wanted
    needed = jnp.where(value > 0, jnp.ceil(missing / jnp.where(value > 0, value, 1.0)), jnp.inf)
    restricted = (top_p < 1) & (border.sum(-1) > needed)  # rare, so it costs nothing while no row needs it
    last = jax.lax.cond(
        jnp.any(restricted),
        _lowest_ids,
        lambda border, needed: jnp.full_like(threshold, border.shape[1]),
        border,
        needed,
    )
    ids = jnp.arange(weights.shape[1], dtype=jnp.int32)[None, :]
    kept = (bits > threshold[:, None]) | (border & (ids <= last[:, None]))
    return jnp.where((top_p >= 1)[:, None] | kept, weights, 0.0)


def _lowest_ids(members: Bool[Array, "B V"], wanted: Float[Array, " B"]) -> Int[Array, " B"]:
    """The smallest id of each row up to which there are ``wanted`` members; the last id where there are fewer."""
    ids = jnp.arange(members.shape[1], dtype=jnp.int32)[None, :]

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        enough = jnp.sum(members & (ids <= middle[:, None]), axis=-1) >= wanted
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    bounds = jnp.zeros(len(members), jnp.int32), jnp.full(len(members), members.shape[1] - 1, jnp.int32)
    return jax.lax.fori_loop(0, members.shape[1].bit_length(), halve, bounds)[1]


def keep_min_p(weights: Float[Array, "B V"], min_p: Float[Array, " B"]) -> Float[Array, "B V"]:
    """The weights that reach the fraction ``min_p`` of the row's largest."""
    return jnp.where(weights >= (min_p * weights.max(-1))[:, None], weights, 0.0)


def _ordered_bits(weights):
    return jax.lax.bitcast_convert_type(weights, jnp.int32)  # ordered like the floats, as none is negative


def _largest_threshold(
    bits: Int[Array, "B V"], holds: Callable[[Int[Array, " B"]], Bool[Array, " B"]]
) -> Int[Array, " B"]:
    """The largest t of each row with ``holds(t)``, which is true for low t and false for high t."""
    largest = bits.max(-1)

    def halve(_, bounds):
        low, high = bounds  # holds(low) is true (the bits 0 keep everything), holds(high) is not known to be
        middle = low + (high - low + 1) // 2
        true = holds(middle)
        return jnp.where(true, middle, low), jnp.where(true, high, middle - 1)

    # The bounds start less than 2**31 apart. Bounding them by the largest weight keeps at least that one.
    return jax.lax.fori_loop(0, 31, halve, (jnp.zeros_like(largest), largest))[0]


# -- Drawing ----------------------------------------------------------------------------------------------


def random_words(seeds: UInt[Array, "B 2"], positions: Int[Array, " B"]) -> UInt[Array, "B 2"]:
    """Two independent 32-bit words per row, a function of its seed and position only."""

    def words(seed, position):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, position), (2,), jnp.uint32)

    return jax.vmap(words)(seeds, positions)


def integer_weights(weights: Float[Array, "B n"]) -> UInt[Array, "B n"]:
    """Weights as integers with the exact sum 2**31; what rounding leaves over goes to the largest."""
    share = weights / weights.sum(-1, keepdims=True)
    whole = jnp.floor(share * 2.0**_TOTAL_BITS).astype(jnp.uint32)
    rest = jnp.uint32(2**_TOTAL_BITS) - whole.sum(-1, dtype=jnp.uint32)  # may be "negative": modulo 2**32
    is_largest = jnp.arange(weights.shape[1])[None, :] == jnp.argmax(weights, -1)[:, None]
    return whole + jnp.where(is_largest, rest[:, None], jnp.uint32(0))


def draw_index(weights: Float[Array, "V B"], words: UInt[Array, "B 2"]) -> Int[Array, " B"]:
    """An index per row with probability proportional to its weight. V is a multiple of ``CHUNK``."""
    chunks = _chunks(weights)
    chunk = _pick(integer_weights(chunks.sum(1).T), words[:, 0])
    return chunk * CHUNK + _pick(integer_weights(_inside(chunks, chunk)), words[:, 1])


def _pick(weights: UInt[Array, "B n"], word: UInt[Array, " B"]) -> Int[Array, " B"]:
    """The index whose interval of the cumulative integer weights holds the word's upper 31 bits."""
    ends = jnp.cumsum(weights, axis=-1, dtype=jnp.uint32)
    index = jnp.sum(ends <= (word >> 1)[:, None], axis=-1, dtype=jnp.int32)
    return jnp.minimum(index, weights.shape[1] - 1)  # only NaN weights get here beyond the end


def argmax(logits: Float[Array, "V B"]) -> Int[Array, " B"]:
    """Index of the largest, lowest id on ties; in two levels, which XLA's CPU argmax is 20 times slower than."""
    chunks = _chunks(logits)
    chunk = jnp.argmax(chunks.max(1).T, axis=-1).astype(jnp.int32)
    return chunk * CHUNK + jnp.argmax(_inside(chunks, chunk), axis=-1).astype(jnp.int32)


def _chunks(values: Float[Array, "V B"]) -> Float[Array, "C c B"]:
    return values.reshape(-1, CHUNK, values.shape[1])


def _inside(chunks: Float[Array, "C c B"], chunk: Int[Array, " B"]) -> Float[Array, "B c"]:
    """Each row's chosen chunk."""
    return jnp.take_along_axis(chunks, chunk[None, None, :], axis=0)[0].T


def _pad(logits: Float[Array, "n B"]) -> Float[Array, "V B"]:
    missing = -logits.shape[0] % CHUNK
    return jnp.pad(logits, ((0, missing), (0, 0)), constant_values=-jnp.inf) if missing else logits
