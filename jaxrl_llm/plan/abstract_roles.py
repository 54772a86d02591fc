"""The roles of a run with shapes in place of arrays: the same programs, no weight is read, no device is used."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxrl_llm import update
from jaxrl_llm.algorithms.interface import Role
from jaxrl_llm.config import RunConfig
from jaxrl_llm.models import lora as adapters
from jaxrl_llm.models.classifier import CLASSIFIERS, architecture_of
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.loading import load_config, read_hf_config
from jaxrl_llm.models.locate import CONFIG_FILES, resolve_path
from jaxrl_llm.models.registry import config_from_hf
from jaxrl_llm.models.value_head import abstract_value_params, value_axes
from jaxrl_llm.roles import RoleBuilder
from jaxrl_llm.sharding import TRAINING, replicated
from jaxrl_llm.types import Params
from jaxrl_llm.update import RoleState


def model_shape(config: RunConfig) -> ModelConfig:
    """The policy's shape, from ``config.json`` alone or ``model.architecture``.

    Raises:
      UserError: neither is there, or it is not supported.
    """
    if config.model.architecture:
        return config_from_hf(config.model.architecture, "model.architecture")
    return load_config(config.model.path)


class AbstractRoles(RoleBuilder):
    """Builds what a `RoleBuilder` does, each array a ``jax.ShapeDtypeStruct`` with its sharding."""

    def _load_start(self, mesh: Mesh, dtype: Any) -> tuple[Decoder, Params]:
        decoder = Decoder(model_shape(self.config).with_vocab_multiple())
        return decoder, placed(decoder.abstract_params(), decoder.logical_axes(), dtype, mesh)

    def _load(self, path: str, dtype: Any, role: Role) -> tuple[Decoder, Params]:
        mesh = self.groups.mesh(role.section)
        if pathlib.Path(path, "checkpoints").is_dir():  # of a run of the same model
            return self.decoder, self._load_start(mesh, dtype)[1]
        local = resolve_path(path, CONFIG_FILES)
        hf = read_hf_config(local)
        body = CLASSIFIERS.get(architecture_of(hf) or "")
        shape = config_from_hf(hf if body is None else {**hf, "architectures": [body]}, str(local))
        decoder = Decoder(shape.with_vocab_multiple())
        if role.head == "values":
            return decoder, placed(abstract_value_params(decoder), value_axes(decoder), dtype, mesh)
        return decoder, placed(decoder.abstract_params(), decoder.logical_axes(), dtype, mesh)

    def _copy_of_start(self, dtype: Any) -> Params:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding), self.start)

    def _headed(self, decoder: Decoder, params: Params) -> Params:
        head = abstract_value_params(decoder)["value_head"]["weight"]
        embedding = params["embed"]["weight"]
        weight = jax.ShapeDtypeStruct(head.shape, embedding.dtype, sharding=replicated(embedding.sharding.mesh))
        return {
            **{name: value for name, value in params.items() if name != "lm_head"},
            "value_head": {"weight": weight},
        }

    def _first_state(
        self,
        params: Params,
        transformation: optax.GradientTransformation,
        shardings: Any,
        mesh: Mesh,
        moments_on_host: bool,
    ) -> tuple[RoleState, RoleState]:
        role_shardings = update.role_shardings_of(
            params, transformation, shardings, mesh, moments_on_host=moments_on_host
        )
        opt_state = with_shardings(jax.eval_shape(transformation.init, params), role_shardings.opt_state)
        return RoleState(params, opt_state), role_shardings

    def _split(self, decoder: Decoder, params: Params, role: Role) -> tuple[Params, Params]:
        assert self.lora is not None
        base = {name: value for name, value in params.items() if name != "value_head"}
        head = {name: value for name, value in params.items() if name == "value_head"}
        shapes, axes = adapters.abstract_adapters(decoder, self.lora), adapters.logical_axes(decoder, self.lora)
        return base, {**placed(shapes, axes, jnp.float32, self.groups.mesh(role.section)), **head}


def placed(shapes: Params, axes: Params, dtype: Any, mesh: Mesh) -> Params:
    """Parameters of logical axes in the training layout of a block, in a dtype."""
    cast = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)
    return with_shardings(cast, TRAINING.shardings(mesh, axes))


def with_shardings(tree: Any, shardings: Any) -> Any:
    """The shapes of a tree, placed."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, shardings
    )
