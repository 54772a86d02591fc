"""Decoders that score: reads and writes the ``*ForSequenceClassification`` folders of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import arrangement
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.export import MAX_FILE_BYTES, write_model
from jaxrl_llm.models.labels import Labels
from jaxrl_llm.models.loading import load_parameters, read_hf_config, resolve_path
from jaxrl_llm.models.registry import FAMILIES, config_from_hf
from jaxrl_llm.models.tensors import TensorRule, rule
from jaxrl_llm.models.value_head import abstract_value_params, add_value_head
from jaxrl_llm.sharding import Layout
from jaxrl_llm.types import Params

CLASSIFIERS: dict[str, str] = {
    architecture.replace("ForCausalLM", "ForSequenceClassification"): architecture for architecture in FAMILIES
}
"""Classifiers by their Hugging Face class name, and the language model that each is without its head."""

END_TOKEN = "score_token_id"
"""The key of ``config.json`` with the token that a text must end in to be scored, where there is one."""

HEAD = "score.weight"
HEAD_RULE = rule("value_head/weight", HEAD, "D", "1 D")


def load_classifier(
    path: str | Path,
    *,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    dtype: DTypeLike = jnp.float32,
    vocab_multiple: int = 1,
    new_head: bool = False,
    several_labels: bool = False,
) -> tuple[Decoder, Params]:
    """A decoder and its parameters with a value head (``value_head.py``); arguments as in ``load_model``.

    Args:
      new_head: also accept a language model (a folder, ``.gguf`` file …): its output matrix, where it has one of its
        own, is left out, and the head is new. A classifier's own head is kept all the same.
      several_labels: also accept a classifier with several labels, which then has ``{'label_head': {'weight':
        [C, D]}}`` instead of a value head.

    Raises:
      UserError: an architecture that is not supported, several labels, or tensors that are missing, left over or of
        another shape.
    """
    local = resolve_path(path)
    hf = read_hf_config(local)
    architecture = architecture_of(hf)
    if architecture not in CLASSIFIERS:
        config = config_from_hf(hf, str(local)) if new_head else None
        if config is None:
            raise UserError(
                f"{local} has the architecture {architecture!r}, which has no score of a text; supported are "
                f"{', '.join(CLASSIFIERS)}. Choose a model of one of these."
            )
        labels = None
    else:
        config = config_from_hf({**hf, "architectures": [CLASSIFIERS[architecture]]}, str(local))
        labels = len(Labels.from_hf(hf).names)
        if labels != 1 and not several_labels:
            raise UserError(
                f"{local} has {labels} labels (id2label or num_labels in its config.json; 2 where it names neither); "
                "a value head has one output. Choose a model with one label."
            )
    decoder = Decoder(config.with_vocab_multiple(vocab_multiple))
    rules = _body_rules(decoder)
    expected = abstract_value_params(decoder)
    if labels == 1:
        rules = (*rules, HEAD_RULE)
    else:
        del expected["value_head"]
    if labels is not None and labels != 1:
        rules = (*rules, rule("label_head/weight", HEAD, "C D", "C D"))
        expected["label_head"] = {"weight": jax.ShapeDtypeStruct((labels, decoder.config.hidden_size), jnp.float32)}
    params = load_parameters(
        local,
        decoder,
        rules,
        expected,
        arrangement.axes_of(expected, arrangement.AXES),
        sizes={"C": labels or 0},
        unread=("lm_head.weight",) if labels is None else (),
        mesh=mesh,
        layout=layout,
        dtype=dtype,
    )
    return decoder, add_value_head(decoder, params) if labels is None else params


def architecture_of(hf: dict[str, Any]) -> str | None:
    """The class name in a ``config.json``."""
    named = hf.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else None


def _body_rules(decoder: Decoder) -> tuple[TensorRule, ...]:
    rules = FAMILIES[decoder.config.architecture].rules(decoder.config)
    return tuple(entry for entry in rules if entry.path != "lm_head/weight")


def export_classifier(
    folder: str | Path,
    decoder: Decoder,
    params: Params,
    tokenizer: Any,
    dtype: DTypeLike = jnp.float32,
    *,
    overwrite: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
    end_token_id: int | None = None,
) -> None:
    """Writes a decoder with a value head as a ``*ForSequenceClassification`` folder with one label.

    transformers loads it with the same scores; for more than one text at a time it needs to know the padding token,
    which is the model's or else the tokenizer's, and a text is then scored at its last token that is another (see
    ``value_head.last_columns``). Arguments and errors are those of ``export_model``.

    Args:
      end_token_id: the token at which the head was trained to score, so that every text has to end in it; the folder
        says so, for `rewards.model_scorer`. Where the padding token is the same, the folder names none: with it, a text
        would be scored one token too early.
    """
    config = decoder.config
    name = next(name for name, architecture in CLASSIFIERS.items() if architecture == config.architecture)
    pad = config.pad_token_id
    if pad is None and tokenizer is not None:
        pad = tokenizer.pad_token_id
    if end_token_id is not None and pad == end_token_id:
        pad = None
    hf = {
        **FAMILIES[config.architecture].to_hf(config),
        "architectures": [name],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": pad,
        "torch_dtype": jnp.dtype(dtype).name,
    }
    # of the model it came from: num_labels would contradict id2label, and the loss is none of several classes
    hf = {key: value for key, value in hf.items() if key not in ("num_labels", "problem_type")}
    rules = (*_body_rules(decoder), HEAD_RULE)
    if end_token_id is not None:
        hf[END_TOKEN] = end_token_id
    write_model(
        folder,
        decoder,
        params,
        rules,
        {"config.json": hf},
        tokenizer,
        dtype,
        overwrite=overwrite,
        max_file_bytes=max_file_bytes,
    )
