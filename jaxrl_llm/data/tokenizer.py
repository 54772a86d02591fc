"""Loads tokenizers: Hugging Face folders and hub ids through transformers, GGUF files without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.gguf_file import explained, open_gguf
from jaxrl_llm.models.locate import resolve_path

# How text is split before byte-level BPE, by the name in `tokenizer.ggml.pre`. The expressions are those of the
# models' own tokenizer.json files.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "llama-bpe": _CONTRACTIONS + r"\p{N}{1,3}|" + _PUNCTUATION,
    "qwen2": _CONTRACTIONS + r"\p{N}|" + _PUNCTUATION,
}
_GGUF_PRE_TOKENIZERS = ("gpt-2", "smollm", *_SPLITS)

_CONTROL, _USER_DEFINED = int(gguf.TokenType.CONTROL), int(gguf.TokenType.USER_DEFINED)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model: chat template, special tokens and their ids included.

    ``path`` is as in ``resolve_path``: a Hugging Face folder, a ``.gguf`` file, a hub id, ``builtin:NAME`` … . Code
    that comes with a model is never run (``trust_remote_code`` is off).

    Raises:
      UserError: nothing is there, or the tokenizer is of a kind that can't be read.
    """
    resolved = resolve_path(path)
    if resolved.suffix == ".gguf":
        with explained(resolved):
            return gguf_tokenizer(resolved)
    try:
        tokenizer = AutoTokenizer.from_pretrained(resolved, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a damaged file raises whatever, its library's panics are no Exceptions
        reason = " ".join(f"{type(error).__name__}: {error}".split())  # transformers' messages have many lines
        raise UserError(
            f"No tokenizer can be loaded from {path} ({reason}). The folder needs tokenizer.json and "
            "tokenizer_config.json; set tokenizer.path if the tokenizer lies elsewhere than the model."
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"The tokenizer in {path} is a {type(tokenizer).__name__}; a fast one (tokenizer.json) is needed. "
            "Set tokenizer.path to a folder that has one."
        )
    return tokenizer


def gguf_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """Builds the byte-level BPE tokenizer that a GGUF file describes, with neither torch nor network.

    Raises:
      UserError: the file's tokenizer is of another kind, or splits text in a way that is not known here.
    """
    fields = open_gguf(file).fields

    def field(name: str, default: Any = None) -> Any:
        key = f"tokenizer.{name}"
        return fields[key].contents() if key in fields else default

    kind, pre = field("ggml.model"), field("ggml.pre")
    if kind != "gpt2" or pre not in _GGUF_PRE_TOKENIZERS:
        raise UserError(
            f"The GGUF file {file} has a tokenizer of kind {kind!r} with pre-tokenizer {pre!r}; supported are byte-"
            f"level BPE ('gpt2') with {', '.join(_GGUF_PRE_TOKENIZERS)}. Set tokenizer.path to the model's Hugging "
            "Face folder or hub id."
        )
    tokens, types = field("ggml.tokens"), field("ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in field("ggml.merges")]
    backend = Tokenizer(
        models.BPE(
            {token: index for index, token in enumerate(tokens)},
            merges,
            ignore_merges=pre == "llama-bpe",  # Llama 3 takes a word that is a token whole
        )
    )
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    backend.add_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED])

    names = {"bos": "bos", "eos": "eos", "padding": "pad"}  # GGUF's name -> transformers'
    ids = {ours: field(f"ggml.{theirs}_token_id") for theirs, ours in names.items()}
    if field("ggml.add_bos_token", False) and ids["bos"] is not None:
        bos = tokens[ids["bos"]]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, ids["bos"])]
        )
    named = {f"{name}_token": tokens[index] for name, index in ids.items() if index is not None}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=field("chat_template"),
        additional_special_tokens=[token for token in special if token not in named.values()],
        clean_up_tokenization_spaces=False,
        **named,
    )


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """``smollm`` cuts digits apart before GPT-2's rule; the newer models bring their own expression."""
    if pre in _SPLITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level
