"""Reward models of both kinds give transformers' scores, whatever the batch; texts are cut where it hurts least."""

import json
import logging
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.config import MeshConfig, RewardModelConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.plan.reward_model import PlannedScorer
from jaxrl_llm.rewards.model_scorer import ModelScorer
from jaxrl_llm.rewards.score_inputs import choose_template, score_inputs
from jaxrl_llm.sharding import make_mesh

WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "U:", "A:", *(chr(code) for code in range(ord("a"), ord("z") + 1))]
SHAPE = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ 'U:' if m.role == 'user' else 'A:' }} {{ m.content }} "
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def _tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a letter; ``<bos> text`` alone, ``<bos> one <eos> two <eos>`` as a pair with token types."""
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.add_special_tokens(WORDS[:6])
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Split("", "isolated")])
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <eos> $B:1 <eos>:1", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    names = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, model_input_names=inputs, **names)


def _save(folder, kind: str, template: str | None = None, **options):
    """A random classifier with its tokenizer, as transformers writes them."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SHAPE, "num_labels": 1, **options}, attn_implementation="eager")
    model = AutoModelForSequenceClassification.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    _tokenizer(template).save_pretrained(folder)
    return model


def _torch_logits(model, inputs: list[dict[str, list[int]]]) -> np.ndarray:
    """One text at a time, without any padding."""
    import torch

    with torch.no_grad():
        return np.stack([model(**{k: torch.tensor([v]) for k, v in one.items()}).logits[0].numpy() for one in inputs])


def _letters(rng: np.random.Generator, low: int, high: int) -> str:
    return "".join(rng.choice(list("abcdefgh"), int(rng.integers(low, high))))


@pytest.fixture(scope="module")
def texts() -> tuple[list[str], list[str]]:
    rng = np.random.default_rng(0)
    prompts = [_letters(rng, 1, 40) for _ in range(9)]
    return prompts, ["", *(_letters(rng, 1, 50) for _ in range(8))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders and torch models: a decoder with and without a chat template, BERT and RoBERTa."""
    made = {}
    for name, (kind, template, options) in {
        "chat": ("qwen2", CHAT_TEMPLATE, {"num_key_value_heads": 2}),
        "concat": ("llama", None, {"num_key_value_heads": 2}),
        "pair": ("bert", None, {"num_labels": 3}),
        "roberta": ("roberta", None, {"type_vocab_size": 1, "num_labels": 2}),
    }.items():
        path = tmp_path_factory.mktemp("reward") / name
        made[name] = (path, _save(path, kind, template, **options))
    return made


def _inputs(name: str, prompts: list[str], completions: list[str]) -> list[dict[str, list[int]]]:
    """What a user of transformers would give the model."""
    tokenizer = _tokenizer(CHAT_TEMPLATE if name == "chat" else None)
    inputs = []
    for prompt, completion in zip(prompts, completions, strict=True):
        if name == "chat":
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            inputs.append({"input_ids": tokenizer.apply_chat_template(turns).input_ids})
        elif name == "concat":
            inputs.append({"input_ids": tokenizer(prompt + completion).input_ids})
        else:
            keys = ("input_ids", "token_type_ids") if name == "pair" else ("input_ids",)
            encoded = tokenizer([prompt], [completion])  # lists: alone, an empty second text would be no text at all
            inputs.append({key: encoded[key][0] for key in keys})
    return inputs


@pytest.mark.parametrize("name", ["chat", "concat", "pair", "roberta"])
def test_scores_equal_transformers(folders, texts, name):
    """Case R13: nine texts of 3 to 90 tokens in rows of 32, 64 and 100, against one text at a time without padding.

    The tolerance is float32's: logits of size 1 to 4 after sums of up to 48 terms in another order (measured: below
    2e-6). Caught: prompts and completions of a batch mixed up; token types left out; scores read at the last column;
    padding attended to; a second BOS before a template's own; another label's odds.
    """
    path, model = folders[name]
    logits = _torch_logits(model, _inputs(name, *texts))
    label = {"pair": 2, "roberta": 1}.get(name)
    if label is None:
        expected = logits[:, 0]
    else:
        others = np.delete(logits, label, axis=1)
        expected = logits[:, label] - np.log(np.exp(others).sum(axis=1))
    scorer = ModelScorer(path, max_tokens=100, batch_tokens=160, label=label)
    assert np.ptp(expected) > 0.1  # the texts do differ
    scores = scorer.score(*texts)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    np.testing.assert_array_equal(scores, scorer.score(*texts))
    assert scorer.metrics["failures"] == scorer.metrics["cut_prompts"] == 0
    assert scorer.metrics["tokens"] == sum(len(one["input_ids"]) for one in _inputs(name, *texts))
    if label is not None:
        probability = ModelScorer(path, max_tokens=100, batch_tokens=160, label=label, output="probability")
        softmax = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(probability.score(*texts), softmax[:, label], atol=1e-5)


def test_shapes_are_few_and_known(folders):
    """Any traffic uses the shapes that warm-up compiles. Caught: rows as many as there are texts."""
    scorer = ModelScorer(folders["concat"][0], max_tokens=50, batch_tokens=200)
    assert scorer.shapes == ((1, 32), (4, 32), (6, 32), (1, 50), (4, 50))
    rng = np.random.default_rng(1)
    used = set()
    run = scorer._run
    scorer._run = lambda shape, inputs: used.add(shape) or run(shape, inputs)
    for count in (1, 2, 5, 13):
        scorer.score([_letters(rng, 1, 60) for _ in range(count)], [_letters(rng, 1, 60) for _ in range(count)])
    assert used <= set(scorer.shapes) and len(used) > 2


def test_no_texts_no_scores(folders):
    scorer = ModelScorer(folders["concat"][0], max_tokens=32, batch_tokens=32)
    assert scorer.score([], []).shape == (0,)
    assert scorer.metrics["texts"] == 0


@pytest.mark.parametrize(
    ("template", "limit", "expected", "cut"),
    [
        ("concat", 9, "<bos> c d e f x y z w", (2, 0)),
        ("concat", 4, "<bos> y z w", (6, 1)),
        ("pair", 9, "<bos> e f <eos> x y z w <eos>", (4, 0)),
        ("pair", 5, "<bos> <eos> z w <eos>", (6, 2)),
        ("chat", 9, "<bos> e f A: x y z w <eos>", (5, 0)),
        ("chat", 4, "<bos> z w <eos>", (8, 2)),
    ],
)
def test_long_texts_lose_the_beginning_of_their_prompt(template, limit, expected, cut):
    """Then that of the completion; the special tokens and the end stay. Caught: the end cut, where a decoder is scored;
    the BOS cut; the completion cut while the prompt has tokens left."""
    tokenizer = _tokenizer(CHAT_TEMPLATE)
    (long,) = score_inputs(tokenizer, ["abcdef"], ["xyzw"], template=template, max_tokens=limit)
    assert tokenizer.convert_ids_to_tokens(long.token_ids) == expected.split()
    assert (long.cut_prompt_tokens, long.cut_completion_tokens) == cut
    first_text = expected.split().index("<eos>") + 1 if template == "pair" else limit
    assert long.token_types.tolist() == [0] * first_text + [1] * (limit - first_text)
    with pytest.raises(UserError, match=r"max_tokens is 0, too few for the \d special tokens"):
        score_inputs(tokenizer, ["abcdef"], ["xyzw"], template=template, max_tokens=0)


def test_cuts_are_counted_and_told_once(folders, caplog):
    scorer = ModelScorer(folders["concat"][0], max_tokens=32, batch_tokens=64)
    with caplog.at_level(logging.WARNING, "jaxrl_llm.rewards.model_scorer"):
        for _ in range(2):
            scores = scorer.score(["a" * 40, "a" * 3, "b"], ["c", "c", "c" * 60])
            assert (scorer.metrics["cut_prompts"], scorer.metrics["cut_completions"]) == (2, 1)
    assert np.isfinite(scores).all()
    assert len([record for record in caplog.records if "max_tokens = 32" in record.getMessage()]) == 1


def test_chats_and_what_auto_means():
    """A chat keeps its turns under ``chat``, and is its contents elsewhere."""
    plain, chatting = _tokenizer(), _tokenizer(CHAT_TEMPLATE)
    assert choose_template(chatting, "auto", is_encoder=True) == "chat"
    assert choose_template(plain, "auto", is_encoder=True) == "pair"
    assert choose_template(plain, "auto", is_encoder=False) == "concat"
    assert choose_template(chatting, "pair", is_encoder=False) == "pair"
    with pytest.raises(UserError, match="no chat template"):
        choose_template(plain, "chat", is_encoder=False)
    with pytest.raises(UserError, match="template is 'jinja'; allowed: 'auto', 'chat', 'pair', 'concat'"):
        choose_template(plain, "jinja", is_encoder=False)
    turns = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]

    def read(template: str) -> str:
        (made,) = score_inputs(chatting, [turns], ["x"], template=template, max_tokens=99)
        return " ".join(chatting.convert_ids_to_tokens(made.token_ids))

    assert read("chat") == "<bos> U: a b A: c <eos> U: d A: x <eos>"
    assert read("pair") == "<bos> a b c d <eos> x <eos>"
    assert read("concat") == "<bos> a b c d x"


def test_scores_that_are_no_numbers_are_failures(folders, tmp_path, caplog):
    """Caught: infinity passed on as a reward."""
    path = shutil.copytree(folders["concat"][0], tmp_path / "copy")
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][WORDS.index("q")] = np.nan
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    scorer = ModelScorer(path, max_tokens=32, batch_tokens=128)
    with caplog.at_level(logging.WARNING, "jaxrl_llm.rewards.model_scorer"):
        scores = scorer.score(["a", "a", "b"], ["b", "q", "c"])
    assert np.isnan(scores).tolist() == [False, True, False]
    assert scorer.metrics["failures"] == 1
    assert "no finite score for 1 of 3 texts" in caplog.text

    tensors["model.norm.weight"][0], tensors["score.weight"][:] = 1e3, [3e38] + [0.0] * 31  # beyond float32
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    scorer = ModelScorer(path, max_tokens=32, batch_tokens=128)
    assert np.isnan(scorer.score(["a", "a"], ["b", "c"])).all()
    assert scorer.metrics["failures"] == 2


@pytest.mark.parametrize("shape", [(2, 1, 2, 2), (1, 2, 2, 2)], ids=str)
def test_on_a_mesh_scores_are_the_same(folders, texts, shape):
    """Rows over data, pipeline and fsdp, weights over fsdp and tensor, layers over pipeline; sums in another order,
    hence float32's tolerance."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(shape), ("data", "pipeline", "fsdp", "tensor"))
    for name, label in (("concat", None), ("pair", 0)):
        options = {"max_tokens": 100, "batch_tokens": 400, "label": label}
        expected = ModelScorer(folders[name][0], **options).score(*texts)
        sharded = ModelScorer(folders[name][0], mesh=mesh, **options)
        assert all(rows % 4 == 0 for rows, _ in sharded.shapes)
        np.testing.assert_allclose(sharded.score(*texts), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, "'LlamaForCausalLM'.*can't score.*Qwen3ForSeq.*, BertForSeq"),
        ({"architectures": ["GPT2ForSequenceClassification"]}, {}, "'GPT2ForSequenceClassification'.*supported are"),
        ({}, {"max_tokens": 129}, "max_tokens is 129, but .* reads at most 128 tokens"),
        ({}, {"batch_tokens": 0}, "batch_tokens = 0; they must be at least 0 and 1"),
        ({}, {"label": 1}, r"label is 1, but its labels are 0 \(LABEL_0\)"),
        ({}, {"template": "chat"}, "no chat template"),
    ],
)
def test_what_can_not_be_is_refused(folders, tmp_path, changes, options, message):
    path = shutil.copytree(folders["concat"][0], tmp_path / "copy")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UserError, match=message):
        ModelScorer(path, **{"max_tokens": 32, **options})


def test_by_default_it_reads_what_the_model_can(folders):
    """Caught: 1,024 tokens whatever the model reads, which refused every model with a shorter context."""
    assert max(tokens for _, tokens in ModelScorer(folders["concat"][0], batch_tokens=128).shapes) == 128


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    """Caught: an id beyond the embedding read as its last row."""
    _save(tmp_path, "llama", num_key_value_heads=2, vocab_size=len(WORDS) - 1)
    scorer = ModelScorer(tmp_path, max_tokens=32)
    with pytest.raises(UserError, match=f"token id {len(WORDS) - 1}, but its model has {len(WORDS) - 1} tokens"):
        scorer.score(["a"], ["z"])


@pytest.mark.parametrize("name", ["concat", "pair", "roberta"])
def test_a_plan_has_the_arrays_of_the_model(folders, name):
    """From ``config.json`` alone: parameters, shardings and the largest batch of a scorer on a mesh.

    Caught: a head for one label where there are three; an encoder that is split; rows of one device.
    """
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
    label = {"pair": 2, "roberta": 1}.get(name)
    scorer = ModelScorer(folders[name][0], max_tokens=100, batch_tokens=400, label=label, mesh=mesh)
    settings = RewardModelConfig(
        path=str(folders[name][0]), max_tokens=100, batch_tokens=400, label=-1 if label is None else label
    )
    planned = PlannedScorer.of(settings, mesh, np.dtype("float32"))
    found, wanted = jax.tree.leaves_with_path(planned.params), jax.tree.leaves_with_path(scorer._params)
    assert [path for path, _ in found] == [path for path, _ in wanted]
    for (path, one), (_, array) in zip(found, wanted, strict=True):
        assert (one.shape, one.dtype) == (array.shape, array.dtype), path
        assert one.sharding.is_equivalent_to(array.sharding, array.ndim), path
    assert planned.program.arguments[1].shape == scorer.shapes[-1] == (4, 100)
    assert planned.batches(5, 40) == (1, 5 * 64) and planned.batches(5, 999) == (2, 500)
