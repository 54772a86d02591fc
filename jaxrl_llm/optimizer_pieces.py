"""An optimizer step that has a piece of its state on the devices at a time, where it rests in the host's memory.

The pieces are the parts of a model that are no layers, and the layers one by one. Every optimizer here treats each
entry of a parameter by itself, so that pieces add up to the step of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Int

from jaxrl_llm.host_memory import fetched, put_back
from jaxrl_llm.models.placement import pipeline_stages
from jaxrl_llm.types import Params

Step = Callable[[Params, Any, Params], tuple[Params, Any]]
"""``step(gradients, opt_state, params) -> params, opt_state``, of any part of the tree of parameters."""


def step_in_pieces(step: Step, gradients: Params, opt_state: Any, params: Params) -> tuple[Params, Any]:
    """The step of the whole tree. Each array comes back in the memory where it was."""
    shape = jax.tree.structure(params)

    def of_params(node: Any) -> bool:
        return jax.tree.structure(node) == shape

    # Trees like the parameters, as Adam's two moments, and what stands beside them: counts of updates.
    nodes, structure = jax.tree.flatten(opt_state, is_leaf=of_params)
    moments = {index: node for index, node in enumerate(nodes) if of_params(node)}
    counts = {index: node for index, node in enumerate(nodes) if index not in moments}

    def of_piece(piece: tuple[Any, Any, Any]) -> tuple[dict[int, Any], Any]:
        """New nodes of the state, and new parameters, from gradients, moments and parameters of a part of the tree."""
        gradients, moments, params = piece
        old = {**moments, **counts}
        state = fetched(old)
        new_params, new_state = step(
            gradients, structure.unflatten([state[index] for index in range(len(old))]), params
        )
        return put_back(dict(enumerate(structure.flatten_up_to(new_state))), old), new_params

    def of_layers(run: tuple[Any, Any, Any]) -> tuple[dict[int, Any], Any]:
        """The same of a stacked run, without counts."""
        # A stage of a pipeline has some of the layers: one of each stage is a piece.
        gradients, *carried = jax.tree.map(lambda leaf: leaf.reshape(pipeline_stages(), -1, *leaf.shape[1:]), run)

        def layer(index: Int[Array, ""], carried: Any) -> Any:
            def take(leaf: Array) -> Array:
                return jax.lax.dynamic_slice_in_dim(leaf, index, 1, axis=1)

            def put(leaf: Array, new: Array) -> Array:
                return jax.lax.dynamic_update_slice_in_dim(leaf, new, index, axis=1)

            new_nodes, new_params = of_piece(jax.tree.map(take, (gradients, *carried)))
            return jax.tree.map(put, carried, ({index: new_nodes[index] for index in moments}, new_params))

        count = jax.tree.leaves(carried)[0].shape[1]
        done = jax.lax.fori_loop(0, count, layer, tuple(carried))
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), done)

    def of_part(*path: str) -> tuple[Any, Any, Any]:
        def part(tree: Any) -> Any:
            for name in path:
                tree = tree[name]
            return tree

        return part(gradients), {index: part(node) for index, node in moments.items()}, part(params)

    found = {name: of_piece(of_part(name)) for name in params if name != "blocks"}
    runs = {name: of_layers(of_part("blocks", name)) for name in params.get("blocks", {})}

    def joined(work: Callable[[tuple[dict[int, Any], Any]], Any]) -> Params:
        parts = {name: work(one) for name, one in found.items()}
        return parts | ({"blocks": {name: work(one) for name, one in runs.items()}} if runs else {})

    new_nodes, _ = of_piece(({}, {index: {} for index in moments}, {}))  # counts go on once
    new_nodes |= {index: joined(lambda one, index=index: one[0][index]) for index in moments}
    return joined(lambda one: one[1]), structure.unflatten([new_nodes[index] for index in range(len(nodes))])
