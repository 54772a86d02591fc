"""Work for one sample is numpy on the host: what reaches the device does not grow with the number of samples."""

import os
import pathlib
import sys

import jax

import jaxrl_llm
from jaxrl_llm.trainer import Trainer
from tests.test_trainer import exact, make_config

OURS, JAX = (f"{pathlib.Path(package.__file__).parent}{os.sep}" for package in (jaxrl_llm, jax))


def calls_into_jax(function, *arguments):
    """How often our code called a function of jax while `function` ran."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        if event == "call" and frame.f_code.co_filename.startswith(JAX) and frame.f_back is not None:
            count += frame.f_back.f_code.co_filename.startswith(OURS)

    sys.setprofile(profile)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return count


def test_the_calls_of_a_step_do_not_grow_with_its_samples(capfd):
    """With log-probs of two models and the KL on the host, in one wave of decoding.

    Calls are counted, and, since a jitted function is called past Python, transfers to the device as well.

    Caught: a `jnp` call for each group in the advantages, for each sample in the KL and in the rollout's lengths; a
    jitted function called with each sample's numpy array.
    """
    changes = {
        "algorithm.kl_coef": 0.05,
        "algorithm.kl_in": "reward",
        "train_batch_size": 7,
        "training.mini_batch_size": 7,
        "training.micro_batch_tokens": 28 * 16,
        "rollout.num_slots": 28,
        "rollout.tokens_per_dispatch": 4,
    }
    trainer = Trainer(
        make_config("builtin:addition/train", **changes), None, rewards={"exact": exact}, devices=jax.devices()[:1]
    )
    batches = [trainer.data.batch(0)[:count] for count in (1, 7)]
    for examples in batches:  # compiles
        trainer.step(examples)
    calls, transfers = [], []
    for examples in batches:
        capfd.readouterr()
        with jax.transfer_guard_host_to_device("log_explicit"):
            calls.append(calls_into_jax(trainer.step, examples))
        transfers.append(capfd.readouterr().err.count("host-to-device transfer"))
    trainer.close()
    assert calls[0] == calls[1] > 0
    assert transfers[0] == transfers[1] > 0
