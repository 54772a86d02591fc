"""A tiny random model, engines on it, and the full forward that decode is compared with."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import MeshConfig, RolloutConfig
from jaxrl_llm.decoding.engine import Engine
from jaxrl_llm.decoding.request import Request, SamplingParams, sample_seeds
from jaxrl_llm.models.config import ModelConfig, RopeConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.sharding import GENERATION, make_mesh

CONFIG = ModelConfig(
    architecture="MistralForCausalLM",
    vocab_size=150,
    padded_vocab_size=152,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    max_position=64,
    norm_eps=1e-5,
    rope=RopeConfig(),
    windows=(5, None),  # the first: what prefill computes there reaches the cache of the second
    eos_token_ids=(2, 9),
)
ONE_DEVICE = MeshConfig(data=1, fsdp=1, tensor=1, pipeline=1)
NEAR_TIE = 1e-3


class Model:
    """The tiny decoder, its parameters, and what a full forward says about a sequence."""

    def __init__(self, config=CONFIG, seed=0):
        self.decoder = Decoder(config)
        params = self.decoder.init(jax.random.key(seed))
        # Five times the initial scale: peaked distributions, so that a wrong cache changes tokens.
        self.params = jax.tree.map(lambda leaf: 5 * leaf if leaf.ndim > 1 else leaf, params)
        self._forward = jax.jit(self._logits)

    def scaled(self, factor):
        """The same model with its weight matrices multiplied."""
        other = Model.__new__(Model)
        other.decoder, other._forward = self.decoder, self._forward
        other.params = jax.tree.map(lambda leaf: factor * leaf if leaf.ndim > 2 else leaf, self.params)
        return other

    def generation_params(self, mesh):
        shardings = GENERATION.shardings(mesh, self.decoder.generation_axes())
        return jax.device_put(jax.jit(self.decoder.generation_params)(self.params), shardings)

    def engine(self, rollout, mesh=ONE_DEVICE, **options):
        """An engine and its parameters."""
        count = mesh.data * mesh.fsdp * mesh.tensor * mesh.pipeline
        mesh = make_mesh(mesh, jax.devices()[:count])
        return Engine(self.decoder, mesh, rollout, **options), self.generation_params(mesh)

    def _logits(self, params, tokens):
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        hidden = self.decoder.hidden(params, tokens, positions, jnp.ones_like(positions))
        return self.decoder.logits(params, hidden)[0]

    def logits(self, tokens):
        """``[t, V]`` float32 of a full forward; padded at the end to one compiled shape."""
        padded = np.zeros((1, self.decoder.config.max_position), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(self._forward(self.params, padded))[: len(tokens)]

    def logprobs(self, request, completion):
        """``[t]`` of the response's tokens under `Decoder.token_logprobs`, what the trainer would compute."""
        count, width = len(request.prompt_ids), self.decoder.config.max_position
        row = np.zeros((1, width), np.int32)
        tokens = np.concatenate([request.prompt_ids, completion.token_ids])
        row[0, : len(tokens)] = tokens
        mask = np.zeros((1, width), bool)
        mask[0, count : len(tokens)] = True
        positions = np.arange(width, dtype=np.int32)[None]
        temperature = request.sampling.temperature or 1.0
        outputs = self._score(self.params, row, positions, mask, jnp.float32(temperature))
        return np.asarray(outputs)[0, count : len(tokens)]

    @functools.cached_property
    def _score(self):
        def score(params, tokens, positions, mask, temperature):
            hidden = self.decoder.hidden(params, tokens, positions, jnp.ones_like(positions))
            return self.decoder.token_logprobs(params, hidden, tokens, mask, temperature).logprobs

        return jax.jit(score)

    def check_same(self, request, left, right, tolerance=1e-4):
        """Equal completions, or the first differing token was a near-tie for the draw."""
        for a, b in zip(left, right, strict=True):
            shared = min(len(a.token_ids), len(b.token_ids))
            differs = np.flatnonzero(a.token_ids[:shared] != b.token_ids[:shared])
            same = int(differs[0]) if len(differs) else shared
            np.testing.assert_allclose(a.logprobs[:same], b.logprobs[:same], atol=tolerance)
            if not len(differs):
                assert len(a.token_ids) == len(b.token_ids) and a.finish_reason == b.finish_reason
                continue
            tokens = np.concatenate([request.prompt_ids, a.token_ids[:same]])
            logits = self.logits(tokens)[-1]
            margin = abs(logits[a.token_ids[same]] - logits[b.token_ids[same]])
            assert request.sampling.temperature == 0, "a drawn token may differ only where weights round apart"
            assert margin < NEAR_TIE, f"token {same} differs with margin {margin}"


@pytest.fixture(scope="session")
def model():
    return Model()


@pytest.fixture(scope="session")
def make_model():
    """Models with other configurations: ``make_model(windows=(None, None))``."""
    return lambda seed=0, **changes: Model(dataclasses.replace(CONFIG, **changes), seed)


@pytest.fixture(scope="session")
def rollout():
    """Small shapes: ``rollout(num_slots=3)`` changes one."""

    def make(**changes):
        return RolloutConfig(**{"num_slots": 4, "page_size": 4, "tokens_per_dispatch": 5, **changes})

    return make


@pytest.fixture(scope="session")
def make_request():
    """``make_request(7, n=3, temperature=0.0)``: a random prompt of 7 tokens, as many samples."""

    def make(length, n=1, key=0, prompt=None, **sampling):
        random = np.random.default_rng(length + 100 * key)
        ids = random.integers(10, 150, length) if prompt is None else prompt
        options = {"max_tokens": 12, **sampling}
        return Request(np.asarray(ids, np.int32), SamplingParams(**options), sample_seeds(7, 0, key, n))

    return make


@pytest.fixture(scope="session")
def mixed_requests(make_request):
    """Groups of every kind: one token, page edges, greedy, tempered, filtered, long."""
    return [
        make_request(1, n=2, key=1),
        make_request(4, n=3, key=2, temperature=0.0),
        make_request(5, n=3, key=3, temperature=0.7, top_p=0.9, max_tokens=20),
        make_request(9, n=2, key=4, top_k=5, ignore_eos=True, max_tokens=17),
        make_request(30, n=3, key=5, temperature=1.3, min_p=0.02, min_tokens=4),
        make_request(16, n=1, key=6, temperature=0.0, max_tokens=25, ignore_eos=True),
        make_request(17, n=4, key=7, max_tokens=1),
    ]
