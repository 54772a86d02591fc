"""Qwen2 and Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115): q, k and v have biases; upper layers may have a window."""

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families.family import Family, HfConfig, read_shared
from jaxrl_llm.models.tensors import llama_rules

DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
KINDS = {"full_attention": False, "sliding_attention": True}


def qwen_windows(hf: HfConfig) -> tuple[int | None, ...]:
    """The window of each layer: of those that ``layer_types`` calls sliding, or else from ``max_window_layers`` on."""
    layers = hf["num_hidden_layers"]
    if not hf["use_sliding_window"] or hf["sliding_window"] is None:
        return (None,) * layers
    kinds = hf["layer_types"]
    if kinds is None:
        sliding = [layer >= hf["max_window_layers"] for layer in range(layers)]
    elif len(kinds) != layers or set(kinds) - set(KINDS):
        raise UserError(
            f"The model's config.json has layer_types = {kinds}; it must name one of {sorted(KINDS)} for each of the "
            f"{layers} layers."
        )
    else:
        sliding = [KINDS[kind] for kind in kinds]
    return tuple(hf["sliding_window"] if slides else None for slides in sliding)


def write_qwen_windows(config: ModelConfig) -> HfConfig:
    """The keys that :func:`qwen_windows` reads."""
    windows = {window for window in config.windows if window is not None}
    return {
        "use_sliding_window": bool(windows),
        "sliding_window": max(windows, default=None),
        "max_window_layers": next(
            (layer for layer, window in enumerate(config.windows) if window is not None), config.num_layers
        ),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in config.windows],
    }


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    defaults=DEFAULTS,
    required={"hidden_act": "silu", "quantization_config": None},
    read=lambda hf: read_shared(hf, windows=qwen_windows(hf), qkv_bias=True),
    write=write_qwen_windows,
    rules=llama_rules,
)
