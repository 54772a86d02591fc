"""Data rows and a context of fixed numbers for algorithms that learn from given completions, and their loss over packed
rows as one number, its metrics and its gradient by sequence."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm import packing
from jaxrl_llm.algorithms import ALGORITHMS
from jaxrl_llm.types import Example

PROMPTS = ([5, 6], [7], [8, 9, 10])
CHOSEN = ([1, 2, 3], [4, 2], [3, 1, 4, 1, 2])
REJECTED = ([3, 2], [1, 5, 9, 2], [2])
SLOPE = {"policy": 0.11, "reference": 0.07}


def numbers(role, sequences):
    """Log-probs that depend on the role, the token, its place and the one before; junk outside of the mask."""
    slope = SLOPE[role]
    return [
        np.where(mask, -0.9 - slope * ((3 * ids + np.roll(ids, 1) + np.arange(len(ids))) % 7), 55.0).astype(np.float32)
        for ids, mask in zip(sequences.tokens, sequences.loss_mask, strict=True)
    ]


@dataclasses.dataclass
class FakeContext:
    config: configs.RunConfig
    step: int = 0
    memory: dict = dataclasses.field(default_factory=dict)
    asked: list = dataclasses.field(default_factory=list)

    @property
    def options(self):
        return self.config.algorithm.options

    def rollouts(self, examples, **_):
        raise AssertionError("prepare does not generate")

    more_examples = values = rollouts

    def logprobs(self, role, sequences):
        self.asked.append(role)
        return numbers(role, sequences)


def make_config(name, changes=(), **algorithm):
    config = configs.default_config(name).to_dict()
    config["model"]["path"] = "builtin:tiny_addition"
    config["train_batch_size"] = 3
    config["rollout"].update(max_new_tokens=5)
    config["algorithm"].update(algorithm)
    for section, values in dict(changes).items():
        config[section].update(values) if isinstance(values, dict) else config.update({section: values})
    return configs.resolve(config)


def preferences(**metadata):
    """Three pairs; `metadata` has a list for each column."""
    return [
        Example(
            f"{n}@0",
            "",
            np.array(PROMPTS[n], np.int32),
            metadata={name: values[n] for name, values in metadata.items()},
            response_ids=np.array(CHOSEN[n], np.int32),
            rejected_ids=np.array(REJECTED[n], np.int32),
            row=n,
        )
        for n in range(3)
    ]


def over_rows(name, options, sequences, values, outputs_of, *, row_tokens=16, rows_per_micro=1, share_prompts=True):
    """The loss over packed rows, its metrics and its gradient in `values`, all as the update makes them.

    Args:
      values: one array ``[t]`` a sequence, which `outputs_of` makes the model's outputs of, given them in rows.
    """
    algorithm = ALGORITHMS[name]
    kept = {name: sequences.extras[name] for name in algorithm.extras(options)}
    batch, placement = packing.pack(
        dataclasses.replace(sequences, extras=kept, sampler_logprobs=values),
        packing.RowShape(row_tokens, rows_per_micro),
        aggregation=algorithm.loss_aggregation(options),
        max_response_tokens=5,
        max_micro_batches=len(values),
        share_prompts=share_prompts,
    )
    junk = np.where(batch.rows.loss_mask, batch.rows.sampler_logprobs, 33.0).astype(np.float32)
    rows = dataclasses.replace(batch.rows, sampler_logprobs=np.zeros_like(junk))

    def total(given):
        found = []
        for index in range(batch.num_micro_batches):
            one = jax.tree.map(lambda field, index=index: jnp.asarray(field[index]), rows)
            found.append(algorithm.losses(options, outputs_of(given[index]), one))
        return sum(one.total for one in found) / batch.denominator, found

    (loss, found), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(junk))
    metrics = {name: sum(one.weighted[name] for one in found) / batch.denominator for name in found[0].weighted}
    for name in found[0].counted:
        value, count = (sum(one.counted[name][place] for one in found) for place in (0, 1))
        metrics[name] = value / max(count, 1.0)
    outside = np.where(batch.rows.loss_mask, 0.0, gradient)
    assert not outside.any(), "a gradient where nothing is trained"
    lengths = [len(ids) for ids in sequences.tokens]
    return (
        float(loss),
        {name: float(value) for name, value in metrics.items()},
        packing.unpack(np.asarray(gradient), placement, lengths),
    )
