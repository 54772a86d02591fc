"""The decoder's blocks in flax.nnx: definitions only.

Parameters live in plain nested dicts (``decoder.py``); a block is bound to its slice of them while it is traced.
Two arrangements of the same weights run through the same code:

- *training*: q, k, v, gate and up apart, as the optimizer, the checkpoint and the mesh see them;
- *generation*: q, k, v in one array and gate, up in another, so that a decode step reads fewer, larger arrays; its
  matrices may be quantized, with a scale beside each (``low_precision.py``).

LoRA adapters (arXiv:2106.09685) are a branch beside a product, ``x W + scale (x A) B``: nothing of W's size is ever
made of A and B, neither in the forward nor in the backward pass.

Activations are flat ``[N, D]``, N tokens in any order: only ``attend`` knows which of them belong together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrl_llm.models.config import Lora, ModelConfig
from jaxrl_llm.models.low_precision import SCALE, product
from jaxrl_llm.models.placement import place
from jaxrl_llm.models.platform import compiles_for_cpu
from jaxrl_llm.models.rope import rotate

Attend = Callable[[Float[Array, "N H h"], Float[Array, "N K h"], Float[Array, "N K h"]], Float[Array, "N H h"]]
RopeTables = tuple[Float[Array, "N h"], Float[Array, "N h"]]


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float) -> nnx.Param:
    """A float32 weight drawn from a normal distribution with this standard deviation."""
    return nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) * scale)


def _scale_of(module: nnx.Module, name: str) -> Array | None:
    """The scale of a quantized matrix; None for one that is not."""
    scale = getattr(module, name + SCALE, None)
    return None if scale is None else scale[...]


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + epsilon) * scale`` (arXiv:1910.07467) over the last axis, in float32."""

    def __init__(self, size: int, epsilon: float):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))

    def __call__(self, x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        return _rms_norm(x, self.scale[...], self.epsilon)


@functools.partial(jax.checkpoint, static_argnums=2)  # the backward pass computes it again from x alone
def _rms_norm(x: Float[Array, "*N D"], scale: Float[Array, " D"], epsilon: float) -> Float[Array, "*N D"]:
    value = x.astype(jnp.float32)
    value = value * jax.lax.rsqrt(jnp.mean(value * value, axis=-1, keepdims=True) + epsilon)
    return value.astype(x.dtype) * scale.reshape((1,) * (x.ndim - 1) + (-1,))


def _widen(low: Float[Array, "N r"], b: Float[Array, "r ..."]) -> Array:
    """``low B``. By its batch dimension of 1, which XLA drops, the policy `dots` of `Decoder.hidden` knows not to keep
    this product for the backward pass: it is as wide as that with the matrix, but cheap."""
    return jax.lax.dot_general(low[None], b[None], (((2,), (1,)), ((0,), (0,))))[0]


class Adapted(nnx.Module):
    """A module some of whose matrices have adapters: NAME_lora_a ``[*in, r]`` and NAME_lora_b ``[r, *out]``."""

    adapters: tuple[str, ...] = ()
    lora_scale: float = 0.0

    def add_adapters(self, shapes: AdapterShapes, scale: float, rngs: nnx.Rngs) -> None:
        """A normal with standard deviation ``1 / sqrt(inputs)``, B zero: the model starts as it was.

        The paper draws A from a normal distribution. With this deviation ``x A`` has the mean square of x. PEFT and
        the paper's code draw uniformly from ``+- 1 / sqrt(inputs)``, whose deviation is smaller by sqrt(3).
        """
        self.adapters, self.lora_scale = tuple(shapes), scale
        for name, (inputs, shape_a, shape_b) in shapes.items():
            setattr(self, f"{name}_lora_a", normal(rngs, shape_a, inputs**-0.5))
            setattr(self, f"{name}_lora_b", nnx.Param(jnp.zeros(shape_b, jnp.float32)))

    def adapted(self, name: str, value: Float[Array, "N ..."], x: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
        """``value``, the product of x with this matrix, and the branch of its adapters where it has any."""
        return value + _widen(self._low(name, x), self._lora_b(name)) if name in self.adapters else value

    def _low(self, name: str, x: Float[Array, "N ..."]) -> Array:
        low = jnp.tensordot(x, getattr(self, f"{name}_lora_a")[...], axes=x.ndim - 1)
        return place(low * self.lora_scale, "rows", *[None] * (low.ndim - 1))

    def _lora_b(self, name: str) -> Array:
        return getattr(self, f"{name}_lora_b")[...]


AdapterShapes = dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]]
"""Per matrix: its number of inputs, the shape of A and that of B."""


def _adapter_shapes(config: ModelConfig, lora: Lora, fused: bool) -> tuple[AdapterShapes, AdapterShapes]:
    """Those of the attention and of the MLP; see ``arrangement.fuse_adapters`` for the fused ones."""
    embed, hidden, rank = config.hidden_size, config.intermediate_size, lora.rank
    heads, kv_heads, head = config.num_heads, config.num_kv_heads, config.head_size
    attention: AdapterShapes = {
        "q": (embed, (embed, rank), (rank, heads, head)),
        "k": (embed, (embed, rank), (rank, kv_heads, head)),
        "v": (embed, (embed, rank), (rank, kv_heads, head)),
        "o": (heads * head, (heads, head, rank), (rank, embed)),
    }
    mlp: AdapterShapes = {
        "gate": (embed, (embed, rank), (rank, hidden)),
        "up": (embed, (embed, rank), (rank, hidden)),
        "down": (hidden, (hidden, rank), (rank, embed)),
    }
    attention, mlp = ({name: part[name] for name in part if name in lora.targets} for part in (attention, mlp))
    if fused:
        if parts := [attention.pop(name) for name in "qkv" if name in attention]:
            ranks = len(parts) * rank
            attention["qkv"] = (embed, (embed, ranks), (ranks, kv_heads, config.group_size + 2, head))
        if [mlp.pop(name) for name in ("gate", "up") if name in mlp]:
            mlp["gate_up"] = (embed, (embed, 2, rank), (2, rank, hidden))
    return attention, mlp


class Attention(Adapted):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions; biases and q/k norms where the model has them.

    Query head ``i`` reads key/value head ``i // group_size``. ``o`` is ``[H, h, D]``, in generation ``[D, H, h]``.
    """

    qkv: nnx.Param  # only in the fused arrangement
    qkv_bias: nnx.Param

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, fused: bool, quantized: bool):
        embed, heads, kv_heads, head = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_size
        self.group_size = config.group_size
        self.fused = fused
        self.biased = config.qkv_bias
        self.normed = config.qk_norm
        shapes = {"q": (embed, heads, head), "k": (embed, kv_heads, head), "v": (embed, kv_heads, head)}
        if fused:
            shapes = {"qkv": (embed, kv_heads, config.group_size + 2, head)}
        for name, shape in shapes.items():
            setattr(self, name, normal(rngs, shape, config.init_scale))
            if config.qkv_bias:
                setattr(self, f"{name}_bias", nnx.Param(jnp.zeros(shape[1:], jnp.float32)))
        if config.qk_norm:
            self.q_norm = RMSNorm(head, config.norm_eps)
            self.k_norm = RMSNorm(head, config.norm_eps)
        self.o = normal(rngs, (embed, heads, head) if fused else (heads, head, embed), config.init_scale)
        if quantized:
            self.qkv_scale = nnx.Param(jnp.ones(shapes["qkv"][1:], jnp.float32))
            self.o_scale = nnx.Param(jnp.ones((embed,), jnp.float32))

    def __call__(self, x: Float[Array, "N D"], rope: RopeTables, attend: Attend) -> Float[Array, "N D"]:
        q, k, v = self.project_fused(x) if self.fused else self.project(x)
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        attended = attend(rotate(q, rope), rotate(k, rope), v)
        return self.adapted("o", self._output(attended), attended)

    def _output(self, attended: Float[Array, "N H h"]) -> Float[Array, "N D"]:
        if not self.fused:
            return jnp.einsum("nih,ihd->nd", attended, self.o[...])
        scale = _scale_of(self, "o")
        if not compiles_for_cpu():
            return product("nih,dih->nd", attended, self.o[...], None if scale is None else scale[None])
        # As in `MLP`; with two summed axes XLA:CPU would transpose the weight at every step to make one of them.
        columns = jax.lax.optimization_barrier(attended.reshape(len(attended), -1).T)
        weight = self.o[...].reshape(self.o.shape[0], -1)
        return jax.lax.optimization_barrier(
            product("df,fn->dn", weight, columns, None if scale is None else scale[:, None])
        ).T

    def project(self, x: Float[Array, "N D"]) -> tuple[Array, Array, Array]:
        """``[N, H, h]`` queries, ``[N, K, h]`` keys and values."""
        projected = []
        for name, axis in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads")):
            value = self.adapted(name, jnp.einsum("nd,dih->nih", x, getattr(self, name)[...]), x)
            value = place(value, "rows", axis, None)
            projected.append(value + getattr(self, f"{name}_bias")[...][None] if self.biased else value)
        return projected[0], projected[1], projected[2]

    def project_fused(self, x: Float[Array, "N D"]) -> tuple[Array, Array, Array]:
        """The same from one product; per key/value head: its query heads, its key, its value."""
        scale = _scale_of(self, "qkv")
        value = product("nd,dkgh->nkgh", x, self.qkv[...], None if scale is None else scale[None])
        value = self.adapted("qkv", value, x)
        if self.biased:
            value += self.qkv_bias[...][None]
        group = self.group_size
        q = value[:, :, :group].reshape(len(x), -1, value.shape[-1])
        return q, value[:, :, group], value[:, :, group + 1]


class MLP(Adapted):
    """SwiGLU (arXiv:2002.05202): ``down(silu(gate x) * up x)``.

    Training keeps gate and up ``[D, F]`` and down ``[F, D]``. Generation keeps ``gate_up [2, F, D]`` and
    ``down [D, F]``: with few tokens the weights are then the streamed left operand of the product.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, fused: bool, quantized: bool):
        embed, hidden = config.hidden_size, config.intermediate_size
        self.fused = fused
        if fused:
            self.gate_up = normal(rngs, (2, hidden, embed), config.init_scale)
            self.down = normal(rngs, (embed, hidden), config.init_scale)
            if quantized:
                self.gate_up_scale = nnx.Param(jnp.ones((2, hidden), jnp.float32))
                self.down_scale = nnx.Param(jnp.ones((embed,), jnp.float32))
        else:
            self.gate = normal(rngs, (embed, hidden), config.init_scale)
            self.up = normal(rngs, (embed, hidden), config.init_scale)
            self.down = normal(rngs, (hidden, embed), config.init_scale)

    def __call__(self, x: Float[Array, "N D"]) -> Float[Array, "N D"]:
        if not self.fused:
            gate, up = (self.adapted(name, x @ getattr(self, name)[...], x) for name in ("gate", "up"))
            return jax.checkpoint(self._down_of)(gate, up)
        gate_up, down = (_scale_of(self, name) for name in ("gate_up", "down"))
        if not compiles_for_cpu():
            scale = None if gate_up is None else gate_up[:, None]
            gate, up = self._adapted_gate_up(product("nd,cfd->cnf", x, self.gate_up[...], scale), x, "cnf")
            hidden = jax.nn.silu(gate) * up
            output = product("nf,df->nd", hidden, self.down[...], None if down is None else down[None])
            return self.adapted("down", output, hidden)
        # On XLA:CPU a product W @ x.T packs only the small x.T. The barriers keep XLA from rewriting it into the
        # slow transposed form (a decode step of a 135M model at 64 sequences: 77 ms without, 73 ms with).
        columns = jax.lax.optimization_barrier(x.T)
        both = product("cfd,dn->cfn", self.gate_up[...], columns, None if gate_up is None else gate_up[..., None])
        gate, up = self._adapted_gate_up(both, x, "cfn")
        hidden = jax.nn.silu(gate) * up
        output = product("df,fn->dn", self.down[...], hidden, None if down is None else down[:, None])
        return self.adapted("down", jax.lax.optimization_barrier(output).T, hidden.T)

    def _down_of(self, gate: Float[Array, "N F"], up: Float[Array, "N F"]) -> Float[Array, "N D"]:
        """``down(silu(gate) * up)``. Under `jax.checkpoint` the backward pass keeps gate and up alone and computes what
        `down` was multiplied with again, element by element; it does not need the product itself."""
        hidden = place(jax.nn.silu(gate) * up, "rows", "mlp")
        return self.adapted("down", hidden @ self.down[...], hidden)

    def _adapted_gate_up(self, value: Array, x: Float[Array, "N D"], order: str) -> Array:
        """The same as ``adapted``; ``order`` names the axes of ``value``."""
        if "gate_up" not in self.adapters:
            return value
        return value + jnp.einsum(f"ncr,crf->{order}", self._low("gate_up", x), self._lora_b("gate_up"))


class Block(nnx.Module):
    """One layer: attention and MLP, each behind a norm and added to its input."""

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        fused: bool = False,
        lora: Lora | None = None,
        quantized: bool = False,
    ):
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, rngs, fused, quantized)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config, rngs, fused, quantized)
        if lora is not None:  # last, so that adapters change no other number of a fresh model
            for module, shapes in zip((self.attention, self.mlp), _adapter_shapes(config, lora, fused), strict=True):
                module.add_adapters(shapes, lora.scale, rngs)

    def __call__(
        self, x: Float[Array, "N D"], rope: RopeTables, attend: Attend, residual: str = "rows"
    ) -> Float[Array, "N D"]:
        """``residual``: the logical axis of tokens outside of attention and MLP, ``rows`` or ``sequence``."""
        x = x + self._enclosed(lambda h: self.attention(h, rope, attend), self.attention_norm(x), residual)
        return x + self._enclosed(self.mlp, self.mlp_norm(x), residual)

    def _enclosed(
        self, part: Callable[[Float[Array, "N D"]], Float[Array, "N D"]], x: Float[Array, "N D"], residual: str
    ) -> Float[Array, "N D"]:
        """The part on whole rows, where the tokens outside of it are split over ``tensor``."""
        return part(x) if residual == "rows" else place(part(place(x, "rows", None)), residual, None)
