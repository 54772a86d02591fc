"""Chat templates, exactly one BOS, and cuts."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data.prompts import encode_prompts, encode_response, longest_token, render_prompt, truncate
from jaxrl_llm.errors import UserError
from tests.cases import case


def toy_tokenizer(template: str | None = None, *, ends_with_eos: bool = False) -> PreTrainedTokenizerFast:
    """Case T07's vocabulary; plain text is encoded with a BOS in front (and an EOS behind, as some models do)."""
    vocabulary = {"<pad>": 0, **case("T07")["input"]["toy_vocab"], "<eos>": 2, "S:": 6}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.add_special_tokens(["<pad>", "<bos>", "<eos>", "U:", "A:", "S:"])
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>" if ends_with_eos else "<bos> $A",
        special_tokens=[("<bos>", 1), ("<eos>", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", chat_template=template
    )


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ['user', 'system'] %}"
    "{{ raise_exception('no ' + m.role) }}{% endif %}{{ m.role[0] | upper }}:{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
CHAT = [{"role": "user", "content": "hi"}]


def ids(tokenizer: PreTrainedTokenizerFast, prompt: str | list, **options: str) -> list[int]:
    text, templated = render_prompt(tokenizer, prompt, **options)
    (encoded,) = encode_prompts(tokenizer, [text], [templated])
    assert encoded.dtype == np.int32
    return encoded.tolist()


@pytest.mark.parametrize("ends_with_eos", [False, True])
def test_exactly_one_bos(ends_with_eos: bool):
    """Case T07. Seen to catch: encoding a rendered template with the special tokens that plain text gets; not
    adding them to plain text; keeping the EOS that an encoder adds."""
    tokenizer = toy_tokenizer(TEMPLATE, ends_with_eos=ends_with_eos)
    expected = case("T07")["expected"]
    assert render_prompt(tokenizer, CHAT) == (case("T07")["input"]["template"], True)
    assert ids(tokenizer, CHAT) == expected["ids"]
    assert ids(tokenizer, "U:hi", apply_chat_template="never") == expected["raw_string_prompt_ids"]
    assert ids(tokenizer, "<bos>U:hi", apply_chat_template="never") == expected["raw_string_prompt_ids"]
    assert ids(tokenizer, CHAT) == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True).input_ids


def test_when_the_template_is_applied():
    """Seen to catch: plain text given to an instruction-tuned model as it is."""
    chatting, plain = toy_tokenizer(TEMPLATE), toy_tokenizer()
    assert render_prompt(chatting, "hi") == ("<bos>U:hi A:", True)
    assert render_prompt(plain, "hi") == ("hi", False)
    assert render_prompt(chatting, "hi", apply_chat_template="never") == ("hi", False)
    assert render_prompt(chatting, "hi", system_prompt="hi") == ("<bos>S:hi U:hi A:", True)
    own = [{"role": "system", "content": "A:"}, *CHAT]
    assert render_prompt(chatting, own, system_prompt="hi") == ("<bos>S:A: U:hi A:", True)


@pytest.mark.parametrize(
    ("template", "prompt", "options", "message"),
    [
        (None, CHAT, {}, "has none"),
        (None, "hi", {"apply_chat_template": "always"}, "has none"),
        (TEMPLATE, CHAT, {"apply_chat_template": "never"}, "is a chat"),
        (None, "hi", {"system_prompt": "be kind"}, "data.system_prompt = 'be kind'"),
        (TEMPLATE, [{"role": "tool", "content": "x"}], {}, "refuses it: no tool"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "hi", {}, "refuses it: OverflowError: Range too big"),
        ("{{ 1 / 0 }}", "hi", {}, "refuses it: ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "hi", {}, "refuses it: RecursionError"),
    ],
)
def test_prompts_that_do_not_fit_the_tokenizer(template: str | None, prompt: object, options: dict, message: str):
    """Caught: only the errors of the template language told."""
    with pytest.raises(UserError, match=message):
        render_prompt(toy_tokenizer(template), prompt, **options)


def test_responses_end_with_eos():
    assert encode_response(toy_tokenizer(), "hi").tolist() == [4, 2]
    tokenizer = toy_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no EOS"):
        encode_response(tokenizer, "hi")


def test_truncation():
    """Seen to catch: cutting the BOS off on the left."""
    prompt = np.array([1, 10, 11, 12, 13, 14, 15], np.int32)
    assert truncate(prompt, 5, "left", 1).tolist() == [1, 12, 13, 14, 15]
    assert truncate(prompt, 5, "left", None).tolist() == [11, 12, 13, 14, 15]
    assert truncate(prompt, 5, "right", 1).tolist() == [1, 10, 11, 12, 13]
    assert truncate(prompt, 1, "left", 1).tolist() == [15]
    assert truncate(prompt, 7, "left", 1).tolist() == prompt.tolist()


def test_longest_token():
    assert longest_token(toy_tokenizer()) == len("<bos>")


@pytest.mark.parametrize(("text", "words"), [("U:hi \u4f60", "Missing"), ("hi \ud800", "TextEncodeInput")])
def test_a_text_that_the_tokenizer_has_no_tokens_for_is_named(text: str, words: str):
    """Caught: the tokenizers library's own exception, which names neither the row nor its text."""
    tokenizer = toy_tokenizer()
    texts, where = ["hi", text, "hi"], ["row 0", "row 1", "row 2"]
    with pytest.raises(UserError, match=rf"row 1: the text .*can't be encoded by the tokenizer: .*{words}"):
        encode_prompts(tokenizer, texts, [False] * 3, where)
    with pytest.raises(UserError, match="row 5: the text"):
        encode_response(tokenizer, text, "row 5")
