"""Conversations: every turn is what the model gives for all of the text, and computes only what is new."""

import dataclasses
import io
import sys
import types

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import jaxrl_llm
from jaxrl_llm import UserError, main
from jaxrl_llm.conversation import Chat
from jaxrl_llm.types import Completion, Example

TURNS = ("37+58=", "4+9=", "10+20=")


@pytest.fixture(scope="module")
def chat():
    """Pages of one token, so that all of an earlier turn is found."""
    options = {"rollout.page_size": 1, "mesh.fsdp": 1, "mesh.data": 1}
    if jax.device_count() > 1:
        options["mesh.data"] = jax.device_count()
    with jaxrl_llm.chat("builtin:tiny_addition", max_new_tokens=4, seed=3, options=options) as made:
        yield made


@pytest.fixture(autouse=True)
def new_conversation(chat):
    chat.reset()
    chat.trainer.rollout.forget()


def asked(chat, monkeypatch):
    """Fills a list with the prompts of every call, as ids."""
    prompts = []
    complete = chat.trainer.rollout.complete

    def noting(params, examples, **options):
        prompts.extend(example.prompt_ids for example in examples)
        return complete(params, examples, **options)

    monkeypatch.setattr(chat.trainer.rollout, "complete", noting)
    return prompts


def alone(chat, prompt_ids, turn):
    """The answer to the same ids in an engine that has cached nothing."""
    trainer = chat.trainer
    example = Example(uid="alone", prompt="", prompt_ids=prompt_ids, row=turn, epoch=trainer.step_index)
    ((completion,),) = trainer.rollout.complete(
        trainer.roles[trainer.main].whole, [example], step=trainer.step_index, samples=1
    )
    return completion


def test_a_turn_computes_only_what_is_new(chat, monkeypatch):
    """Counted in tokens; the answers are those of a decoder that begins anew.

    Caught: parameters made again each turn, whose cache is forgotten; the answer encoded from its text; its end of
    sequence left in; the same draws every turn.
    """
    prompts = asked(chat, monkeypatch)
    shown, answers, counts = [], [], []
    for turn in TURNS:
        answers.append(chat.say(turn, on_text=shown.append))
        stats = chat.trainer.rollout.engine.stats
        counts.append((stats.found_tokens, stats.prefill_tokens))
    assert counts[0] == (0, len(prompts[0]) - 1)
    for before, answer, ids, count in zip(prompts, answers, prompts[1:], counts[1:], strict=False):
        ended = answer.finish_reason == "stop"
        known = [*before, *answer.token_ids[: -1 if ended else None]]
        assert ids[: len(known)].tolist() == known
        # The last token of an answer was never an input, nor is the last of a prompt one of prefill.
        found = len(before) + len(answer.token_ids) - 1
        assert count == (found, len(ids) - 1 - found)
    assert "".join(shown) == "".join(answer.text for answer in answers)
    assert [turn["content"] for turn in chat.messages[::2]] == list(TURNS)
    assert [turn["content"] for turn in chat.messages[1::2]] == [answer.text for answer in answers]
    for turn, (ids, answer) in enumerate(zip(list(prompts), answers, strict=True)):
        expected = alone(chat, ids, 2 * turn + 1)
        np.testing.assert_array_equal(answer.token_ids, expected.token_ids)
        # Prefill of another length rounds otherwise: float32, a few layers.
        np.testing.assert_allclose(answer.logprobs, expected.logprobs, atol=1e-4)


def test_new_weights_compute_everything_again(chat, monkeypatch):
    """Caught: what earlier weights cached found by later ones; the parameters of the first turn kept."""
    prompts = asked(chat, monkeypatch)
    trainer = chat.trainer
    state = trainer.roles[trainer.main]
    chat.say(TURNS[0])
    trainer.roles[trainer.main] = dataclasses.replace(state, params=jax.tree.map(lambda leaf: 1.3 * leaf, state.params))
    try:
        answer = chat.say(TURNS[1])
        assert trainer.rollout.engine.stats.found_tokens == 0
        expected = alone(chat, prompts[1], 3)
    finally:
        trainer.roles[trainer.main] = state
    np.testing.assert_array_equal(answer.token_ids, expected.token_ids)
    np.testing.assert_allclose(answer.logprobs, expected.logprobs, atol=1e-4)  # rounding of float32


def test_a_step_begins_with_nothing_kept(chat, monkeypatch):
    """An update donates what both layouts may share. Caught: kept parameters that live on."""
    chat.say(TURNS[0])
    trainer = chat.trainer
    assert trainer.rollout._kept is not None

    def collect(context, examples):
        assert trainer.rollout._kept is None
        raise KeyError("collected")

    monkeypatch.setattr(trainer, "algorithm", dataclasses.replace(trainer.algorithm, collect=collect))
    with pytest.raises(KeyError, match="collected"):
        trainer.step([])


def test_a_conversation_has_an_end(chat):
    """A turn that is refused changes nothing. Caught: it kept among the messages."""
    chat.say(TURNS[0])
    before = list(chat.messages)
    with pytest.raises(UserError, match=r"more than data\.max_prompt_tokens = 28"):
        chat.say("1+1=" * 10)
    with pytest.raises(UserError, match="not empty"):
        chat.say("")
    assert chat.messages == before
    assert chat.say(TURNS[1]).text == chat.messages[-1]["content"]


TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content | trim }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def letters() -> PreTrainedTokenizerFast:
    """Letters, one pair of them, and a template that trims."""
    pieces = [" ", *"abcdef", "bc"]
    backend = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [("b", "c")]))
    backend.add_special_tokens(["<end>", "<u>", "<a>"])
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", chat_template=TEMPLATE)


def templated_chat(*answers):
    """A conversation with a model that answers so (pieces, text, reason), and what it was asked, in pieces."""
    answers, asked_for, tokenizer = list(answers), [], letters()

    def complete(params, examples, **_):
        asked_for.append(tokenizer.convert_ids_to_tokens(examples[0].prompt_ids.tolist()))
        pieces, text, reason = answers.pop(0)
        ids = np.array(tokenizer.convert_tokens_to_ids(pieces), np.int32)
        return [[Completion(ids, np.zeros(len(ids), np.float32), text, reason, 0.0)]]

    trainer = types.SimpleNamespace(
        tokenizer=tokenizer,
        config=types.SimpleNamespace(
            data=types.SimpleNamespace(system_prompt="", apply_chat_template="auto", max_prompt_tokens=100)
        ),
        algorithm=types.SimpleNamespace(require_writer=lambda options: None),
        options=None,
        step_index=0,
        roles={"policy": types.SimpleNamespace(whole=None)},
        main="policy",
        rollout=types.SimpleNamespace(complete=complete),
    )
    return Chat(trainer), asked_for


def test_the_tokens_that_the_model_wrote_stay():
    """Here two letters that the tokenizer would make one piece. Caught: the answer encoded from its text; the end of
    the first answer twice."""
    conversation, asked_for = templated_chat(
        (["b", "c", "<end>"], "bc", "stop"), (["bc"], "bc", "length"), ([], "", "")
    )
    for turn in ("a", "e", "f"):
        conversation.say(turn)
    first = ["<u>", "a", "<end>", "<a>", "b", "c", "<end>"]
    assert asked_for[1] == [*first, "<u>", "e", "<end>", "<a>"]
    assert asked_for[2] == [*asked_for[1], "bc", "<end>", "<u>", "f", "<end>", "<a>"]


def test_a_turn_that_the_template_writes_otherwise_is_encoded_anew():
    """A trimmed answer, and one that a stop string cut within a piece. Caught: the old ids beside the new text."""
    conversation, asked_for = templated_chat(
        (["b", "c", " ", "<end>"], "bc ", "stop"), (["a", "bc"], "ab", "stop"), (["d"], "d", "length")
    )
    for turn in ("a", "e", "f"):
        conversation.say(turn)
    assert asked_for[1] == ["<u>", "a", "<end>", "<a>", "bc", "<end>", "<u>", "e", "<end>", "<a>"]
    assert asked_for[2] == [*asked_for[1], "a", "b", "<end>", "<u>", "f", "<end>", "<a>"]


class Parrot:
    """Stands for a conversation."""

    def __init__(self, trainer):
        self.trainer = trainer

    def say(self, turn, on_text):
        on_text(turn[:1].upper())
        on_text(turn[1:].upper())


@pytest.mark.parametrize("typed", [False, True])
def test_turns_are_prompts_or_lines(typed, monkeypatch, capsys):
    """The end of the input ends the conversation. Caught: empty lines answered; a line end left in the turn."""
    monkeypatch.setattr("jaxrl_llm.conversation.Chat", Parrot)
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\n\n  \ncd\r\ne"))
    main.chat(object(), main.typed_turns() if typed else ["ab", "cd", "e"])
    assert capsys.readouterr().out == "AB\nCD\nE\n"


def test_the_cache_of_a_conversation_is_for_one_sequence(monkeypatch, tmp_path, capsys):
    """Caught: pages for as many samples as the run trains on."""

    class Trainer:
        def __init__(self, config, workdir, read_only):
            assert (config.rollout.num_slots, config.rollout.samples_per_prompt, read_only) == (1, 1, True)

        def restore(self):
            return True

        def close(self):
            print("closed")

    (tmp_path / "run.py").write_text(
        "from jaxrl_llm.config import default_config\n\ndef get_config():\n    config = default_config()\n"
        "    config.model.path = 'builtin:tiny_addition'\n    return config\n"
    )
    monkeypatch.setattr("jaxrl_llm.conversation.Chat", Parrot)
    monkeypatch.setitem(sys.modules, "jaxrl_llm.trainer", types.SimpleNamespace(Trainer=Trainer))
    arguments = ["generate", "--chat", "--config", str(tmp_path / "run.py"), "--prompt", "ab", "--prompt", "c"]
    assert main.main(arguments) == 0
    assert capsys.readouterr().out == "AB\nC\nclosed\n"


def test_a_line_without_end_or_text_is_refused(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a" * (main.LINE_CHARACTERS + 1)))
    with pytest.raises(UserError, match="at most 100,000"):
        list(main.typed_turns())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\n\xff\n"), encoding="utf-8"))
    with pytest.raises(UserError, match="not utf-8 text"):
        list(main.typed_turns())
    monkeypatch.setattr("sys.stdin", None)  # closed by the shell
    assert list(main.typed_turns()) == []
