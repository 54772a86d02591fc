"""No algorithm makes an array of tokens times vocabulary, and memory grows with the tokens, not with their square."""

import pytest

from jaxrl_llm.bench import memory
from jaxrl_llm.models.config import ModelConfig, RopeConfig

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=16384,
    padded_vocab_size=16384,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_size=8,
    max_position=8192,
    norm_eps=1e-5,
    windows=(None,),
    rope=RopeConfig(),
    tie_embeddings=True,
)


@pytest.mark.parametrize(("algorithm", "role"), [("grpo", "policy"), ("ppo", "critic"), ("dpo", "policy")])
def test_an_update_keeps_no_logits(algorithm, role):
    """Of 4,096 tokens with chunks of 1,024: an array of all logits would be 256 MiB, one of the row's square 64.
    Caught: chunks as long as the row (policies)."""
    short, long = (memory.temporary_bytes(CONFIG, algorithm, role, length) for length in (2048, 4096))
    assert long < 4 * 4096 * CONFIG.vocab_size  # some chunks of 64 MiB each, and the row's states
    assert long - short < 32 * 2**20  # a square alone would add 48 MiB
