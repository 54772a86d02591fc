"""The engine: decode equals forward, and nothing about batching, pages or replicas shows in a completion."""

import collections
import dataclasses
import itertools
import logging
import re
import types

import jax
import numpy as np
import pytest

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.decoding.request import sample_seeds
from jaxrl_llm.errors import RunStopped, UserError

EIGHT = MeshConfig(data=2, fsdp=2, tensor=2, pipeline=1)


@pytest.fixture(scope="module")
def base(model, rollout, mixed_requests):
    """The mixed requests' completions from the plainest engine, which the other tests compare with."""
    engine, params = model.engine(rollout(num_slots=8))
    return engine.generate(params, mixed_requests)


def check_all(model, requests, left, right):
    for request, a, b in zip(requests, left, right, strict=True):
        model.check_same(request, a, b)


def test_decode_equals_forward(model, mixed_requests, base):
    """Greedy tokens are the argmax of a full forward; log-probs are the trainer's, with temperature, filters,
    windows and groups. One layer has a window of 5, the other none.

    Seen to catch: the window one wider in decode; prefill without the window; lengths one short; the last prompt
    page shared and not copied; wrong page ids; an untempered log-prob; prompts in one row that see each other.
    """
    greedy = 0
    for request, completions in zip(mixed_requests, base, strict=True):
        for completion in completions:
            want = model.logprobs(request, completion)
            np.testing.assert_allclose(completion.logprobs, want, atol=1e-4)
            if request.sampling.temperature == 0:
                tokens = np.concatenate([request.prompt_ids, completion.token_ids])
                logits = model.logits(tokens)[len(request.prompt_ids) - 1 : -1, :150]
                for row, token in zip(logits, completion.token_ids, strict=True):
                    assert token == row.argmax() or row.max() - row[token] < 1e-3
                    greedy += 1
    assert greedy > 20


@pytest.mark.parametrize(
    "changes",
    [
        {"num_slots": 1, "num_pages": 20},
        {"num_slots": 3, "page_size": 1},
        {"num_slots": 7, "page_size": 4, "attention": "xla"},
        {"num_slots": 16, "page_size": 16, "tokens_per_dispatch": 1},
        {"num_slots": 5, "page_size": 8, "tokens_per_dispatch": 64, "prefill_tokens": 7},
    ],
    ids=lambda changes: "-".join(f"{name}_{value}" for name, value in changes.items()),
)
def test_one_run_for_any_shape(model, rollout, mixed_requests, base, changes):
    """The same completions for any slots, pages and dispatch lengths (K25: options move with their sample).

    Seen to catch: randomness from the row instead of the seed; one sample's temperature for its whole batch; the page
    gather of every step without the token just written.
    """
    engine, params = model.engine(rollout(**changes))
    check_all(model, mixed_requests, base, engine.generate(params, mixed_requests))


def test_groups_do_not_change_a_sample(model, rollout, mixed_requests, base):
    """A request alone equals it in company. Seen to catch: randomness from the row of the batch."""
    engine, params = model.engine(rollout(num_slots=8))
    for request, together in zip(mixed_requests[:4], base, strict=False):
        (alone,) = engine.generate(params, [request])
        model.check_same(request, together, alone)


@pytest.mark.parametrize("attention", ["gathered", "xla"])
def test_preemption_changes_nothing(model, rollout, mixed_requests, base, attention):
    """S13: a pool so small that samples lose their pages and are computed again.

    Seen to catch: a random stream that counts from the dispatch; the cache rebuilt without the response; pages not
    given back.
    """
    engine, params = model.engine(rollout(num_slots=8, num_pages=18, tokens_per_dispatch=3, attention=attention))
    completions = engine.generate(params, mixed_requests)
    assert engine.stats.preemptions > 2
    check_all(model, mixed_requests, base, completions)


@pytest.mark.parametrize("attention", ["auto", "xla"])
@pytest.mark.parametrize("mesh", [EIGHT, MeshConfig(data=3, fsdp=1, tensor=1, pipeline=1)], ids=["2_2_2", "3"])
def test_replicas_and_tensor_parallel(model, rollout, mixed_requests, base, mesh, attention):
    """8 devices equal one, and so does a number of replicas that divides nothing.

    Seen to catch: one replica given the tokens of another; the key/value heads of a page not split with the queries'.
    """
    engine, params = model.engine(rollout(num_slots=3, attention=attention), mesh)
    check_all(model, mixed_requests, base, engine.generate(params, mixed_requests))
    pools = jax.tree.leaves(engine._pools)
    assert {pool.sharding.shard_shape(pool.shape)[0] for pool in pools} == {engine.num_pages}


def test_no_compile_after_warmup(model, rollout, mixed_requests, caplog):
    """Any traffic, twice, with the pool freed between. Seen to catch: a bucket left out of the warm-up. Caught: the
    number not told."""
    compiles = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiles.append(kwargs.get("fun_name"))

    engine, params = model.engine(rollout(num_slots=16, num_pages=40))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with caplog.at_level(logging.INFO, "jaxrl_llm.decoding.engine"):
            count = engine.warmup(params)
        assert f"{count} programs compiled" in caplog.text
        sizes = engine._buckets
        assert compiles and count == len(sizes.rows) * len(sizes.columns) + 2 * len(sizes.prefill_tokens) + 1
        assert count <= 16
        compiles.clear()
        for requests in (mixed_requests, mixed_requests[:1], mixed_requests * 3):
            engine.generate(params, requests)
            assert engine.stats.compiles == 0
            engine.release()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiles == []


@pytest.mark.parametrize("attention", ["gathered", "xla"])
def test_compiled_decode_leaves_the_pool_alone(model, rollout, attention):
    """Reads the compiled program on 8 devices: nothing as large as a pool is copied, gathered or moved, and within
    the loop only the count of active rows leaves a tensor group, from outside any branch (replicas that disagreed
    about a branch or the end of the loop would wait for each other for ever).

    Seen to catch: pools sharded by the compiler instead of shard_map (an all-gather of the pool); pools not
    donated; a sampler over the split vocabulary (collectives inside the branches).
    """
    engine, params = model.engine(rollout(num_slots=2, num_pages=400, attention=attention), EIGHT)
    text = engine.decode_text(params)
    pool = 400 * 4 * 1 * 8  # entries per device: pages, page size, half of two heads, head size
    live = 2 * 16 * 4 * 1 * 8  # rows, columns of the page table, page size, heads, head size
    large = collections.Counter()
    for shape, kind in re.findall(r"= \w+\[([\d,]*)\]\S* ([\w-]+)\(", text):
        size = int(np.prod([int(number) for number in shape.split(",") if number], dtype=np.int64))
        if kind in ("copy", "gather", "dynamic-slice", "all-gather", "all-reduce", "all-to-all", "transpose"):
            assert size < pool, f"{kind} of {shape}"
        if kind == "gather":
            large[size] += 1
    assert max(large) <= live
    assert text.count("may-alias") + text.count("must-alias") >= 4, "pools are not updated in place"
    for line in text.splitlines():
        if re.search(r" (all-reduce|all-gather|collective-permute|all-to-all)\(", line) and "while/body" in line:
            assert "/branch_" not in line, f"a collective that some replicas may not reach: {line}"
            assert "replica_groups=[4,2]<=[8]" in line or "= s32[] all-reduce(" in line, line


def test_a_second_turn_finds_the_first(model, rollout, make_request):
    """Case K05: a prompt that goes on where a finished conversation ended computes only what is new, and gives what
    it gives alone; so do prompts that begin alike. Seen to catch: the found pages not read; positions that count from
    the piece's first token."""
    engine, params = model.engine(rollout(num_slots=4))
    first = make_request(18, n=2, key=1, max_tokens=9, ignore_eos=True)
    (completions,) = engine.generate(params, [first])
    turn = np.concatenate([first.prompt_ids, completions[0].token_ids, np.arange(20, 26)])
    second = make_request(0, n=2, key=2, prompt=turn, ignore_eos=True)
    (found,) = engine.generate(params, [second], reuse=True)
    assert engine.stats.found_tokens == (18 + 9 - 1) // 4 * 4
    assert engine.stats.prefill_tokens == len(turn) - 1 - engine.stats.found_tokens
    fresh, fresh_params = model.engine(rollout(num_slots=4))
    (alone,) = fresh.generate(fresh_params, [second])
    assert fresh.stats.found_tokens == 0
    model.check_same(second, alone, found)
    for completion in found:
        np.testing.assert_allclose(completion.logprobs, model.logprobs(second, completion), atol=1e-4)


def test_new_weights_meet_no_old_cache(model, rollout, mixed_requests):
    """K07: same prompts after a large step, in the same engine, of which one array is the same.

    Seen to catch: the parameters of the first call kept; cached pages found under other weights."""
    other = model.scaled(1.7)
    engine, params = model.engine(rollout(num_slots=8))
    first = engine.generate(params, mixed_requests)
    new_params = other.generation_params(engine.mesh)
    new_params["embed"] = params["embed"]
    changed = engine.generate(new_params, mixed_requests, reuse=True)
    fresh_engine, fresh_params = other.engine(rollout(num_slots=8))
    fresh = fresh_engine.generate(fresh_params, mixed_requests)
    check_all(other, mixed_requests, fresh, changed)
    assert any((a[0].token_ids[:3] != b[0].token_ids[:3]).any() for a, b in zip(first, changed, strict=True))


def test_a_dispatch_ends_with_its_last_row(model, rollout, make_request):
    """On two replicas, of which one finishes first. Seen to catch: a loop that always runs to its end; one that
    ends with the first replica."""
    mesh = MeshConfig(data=2, fsdp=1, tensor=1, pipeline=1)
    engine, params = model.engine(rollout(tokens_per_dispatch=50), mesh)
    requests = [make_request(4, max_tokens=count, ignore_eos=True) for count in (3, 11)]
    completions = engine.generate(params, requests)
    assert [len(group[0].token_ids) for group in completions] == [3, 11]
    assert (engine.stats.dispatches, engine.stats.decode_steps) == (1, 11)


def test_same_seed_same_bits(model, rollout, mixed_requests):
    """Equal shapes: bit-equal. Seen to catch: a seed from the clock."""
    engine, params = model.engine(rollout())
    first, second = (engine.generate(params, mixed_requests) for _ in range(2))
    for a, b in zip(itertools.chain(*first), itertools.chain(*second), strict=True):
        assert (a.token_ids == b.token_ids).all() and (a.logprobs == b.logprobs).all()


def test_samples_of_a_group_differ(model, rollout, make_request):
    """S11. Seen to catch: one key for the group; seeds that ignore the step."""
    engine, params = model.engine(rollout(), MeshConfig(data=2, fsdp=1, tensor=1, pipeline=1))
    prompt = np.arange(20, 25)
    requests = [make_request(5, n=4, key=key, prompt=prompt, temperature=5.0) for key in (1, 2)]
    responses = {tuple(c.token_ids.tolist()) for group in engine.generate(params, requests) for c in group}
    assert len(responses) == 8
    assert not (sample_seeds(7, 0, 1, 2) == sample_seeds(7, 1, 1, 2)).any()
    assert (sample_seeds(7, 0, 1, 2) == sample_seeds(7, 0, 1, 5)[:2]).all()


def test_context_limit(model, rollout, make_request):
    """S17. Seen to catch: one token fewer than possible; a prompt as long as the context let in."""
    engine, params = model.engine(rollout(), context=16)
    request = make_request(10, max_tokens=10, ignore_eos=True)
    ((completion,),) = engine.generate(params, [request])
    assert (len(completion.token_ids), completion.finish_reason) == (6, "length")
    np.testing.assert_allclose(completion.logprobs, model.logprobs(request, completion), atol=1e-4)
    ((completion,),) = engine.generate(params, [make_request(15, max_tokens=10)])
    assert len(completion.token_ids) == 1
    with pytest.raises(UserError, match="no room for a response in a context of 16"):
        engine.generate(params, [make_request(16)])
    with pytest.raises(UserError, match="allows 2 to 64"):
        model.engine(rollout(), context=65)


def test_several_eos_ids(make_model, rollout, make_request):
    """T05 through the engine: greedy tokens forced by the embedding of a one-way walk over ids.

    Seen to catch: all but the first EOS id left out of the stop ids; ignore_eos ignoring the first only.
    """
    free = make_model(eos_token_ids=())
    engine, params = free.engine(rollout())
    request = make_request(6, temperature=0.0, max_tokens=8)
    ((open_ended,),) = engine.generate(params, [request])
    walk = open_ended.token_ids.tolist()
    stops = (walk[1], walk[0])  # the second id of the set comes first
    model = make_model(eos_token_ids=stops)
    engine, params = model.engine(rollout())
    ((early,),) = engine.generate(params, [request])
    assert (early.token_ids.tolist(), early.finish_reason) == (walk[:1], "stop")
    ignoring = make_request(6, temperature=0.0, max_tokens=8, ignore_eos=True)
    ((ignored,),) = engine.generate(params, [ignoring])
    assert (ignored.token_ids.tolist(), ignored.finish_reason) == (walk, "length")
    ((held,),) = engine.generate(params, [make_request(6, temperature=0.0, max_tokens=8, min_tokens=3)])
    assert len(held.token_ids) >= 4 or held.token_ids[-1] not in stops
    assert not set(held.token_ids[:3].tolist()) & set(stops)
    named = make_request(6, temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=(walk[3],))
    ((ended,),) = engine.generate(params, [named])
    assert ended.token_ids.tolist() == walk[: walk.index(walk[3]) + 1] and ended.finish_reason == "stop"


def test_the_tokenizers_eos_ends_a_response_too(make_model, rollout, make_request):
    """A base model's files name another EOS than the tokenizer, with which supervised completions end.

    Seen to catch: the tokenizer's left out; the tokenizer's instead of the model's."""
    free = make_model(eos_token_ids=())
    engine, params = free.engine(rollout(), tokenizer=Letters())
    request = make_request(6, temperature=0.0, max_tokens=8)
    ((whole,),) = engine.generate(params, [request])
    walk = whole.token_ids.tolist()
    later = next(token for token in walk if token != walk[0])
    for model_ends, tokenizer_end, length in (
        ((), walk[0], 1),
        ((walk[0],), later, 1),
        ((149,), later, walk.index(later) + 1),
    ):
        model = make_model(eos_token_ids=model_ends)
        engine, params = model.engine(rollout(), tokenizer=Letters(tokenizer_end))
        ((ended,),) = engine.generate(params, [request])
        assert (ended.token_ids.tolist(), ended.finish_reason) == (walk[:length], "stop")
        assert ended.text == Letters().decode(walk[: length - 1], True, False)
    ignoring = make_request(6, temperature=0.0, max_tokens=8, ignore_eos=True)
    ((ignored,),) = engine.generate(params, [ignoring])
    assert ignored.token_ids.tolist() == walk


class Token(str):
    special = True


class Letters:
    """A tokenizer of 140 ids (the model has 150): id i is the letter ``chr(65 + i % 26)``; 7 is special."""

    added_tokens_decoder = types.MappingProxyType({7: Token("<|end|>")})

    def __init__(self, eos_token_id=None):
        self.eos_token_id = eos_token_id

    def __len__(self):
        return 140

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        assert skip_special_tokens and not clean_up_tokenization_spaces
        return "".join(chr(65 + i % 26) for i in ids if i != 7)


def test_stop_strings_and_text(model, rollout, make_request):
    """T19, T21 through the engine. Seen to catch: text with the stop string; a special token as stop string never
    found; the text of an ending token."""
    engine, params = model.engine(rollout(tokens_per_dispatch=16), tokenizer=Letters())
    plain = make_request(6, key=3, max_tokens=14, ignore_eos=True)
    ((whole,),) = engine.generate(params, [plain])
    assert whole.text == Letters().decode(whole.token_ids, True, False) and whole.finish_reason == "length"
    stop = whole.text[4:7]
    request = make_request(6, key=3, max_tokens=14, ignore_eos=True, stop=(stop, "nowhere"))
    ((ended,),) = engine.generate(params, [request])
    end = whole.text.index(stop)
    assert (ended.text, ended.finish_reason) == (whole.text[:end], "stop")
    assert ended.token_ids.tolist() == whole.token_ids[: end + 3].tolist() and len(ended.logprobs) == end + 3
    sample = engine.intake.samples(0, make_request(3, stop=("<|end|>",)))[0]
    sample.receive([5, 6, 7, 5], [0.0] * 4)
    assert (sample.tokens, sample.finish_reason) == ([5, 6, 7], "stop")
    assert engine.intake.completion(sample).text == "FG"


def test_ids_beyond_the_tokenizer_are_never_sampled(model, rollout, make_request):
    """The model has 150 ids in an array of 152, the tokenizer 140; the log-prob counts the 150.

    Seen to catch: the limit taken from the model; the log-prob over 140 or 152 ids.
    """
    engine, params = model.engine(rollout(num_slots=8), tokenizer=Letters())
    request = make_request(6, n=8, temperature=8.0, max_tokens=40, ignore_eos=True)
    (completions,) = engine.generate(params, [request])
    assert max(c.token_ids.max() for c in completions) == 139
    for completion in completions:
        np.testing.assert_allclose(completion.logprobs, model.logprobs(request, completion), atol=1e-4)


def test_calls_of_any_size(model, rollout, make_request):
    """More samples than slots in one group, then calls with more and with fewer requests in the same engine."""
    engine, params = model.engine(rollout(num_slots=2))
    requests = [make_request(6, n=5, key=8), make_request(3, key=9), make_request(9, n=2, key=10)]
    whole = engine.generate(params, requests)
    assert [len(group) for group in whole] == [5, 1, 2]
    for count in (1, 0, 3, 2):
        again = engine.generate(params, requests[:count])
        assert len(again) == count
        check_all(model, requests[:count], whole[:count], again)


def test_progress_release_and_empty(model, rollout, make_request):
    """Seen to catch: progress counted in requests."""
    engine, params = model.engine(rollout())
    assert engine.generate(params, []) == []
    seen = []
    engine.generate(params, [make_request(3, n=3), make_request(4, n=0)], progress=lambda *args: seen.append(args))
    assert seen[-1] == (3, 3) and engine.stats.tokens > 0
    engine.release()
    engine.release()
    (completions, none) = engine.generate(params, [make_request(3, n=3), make_request(4, n=0)])
    assert len(completions) == 3 and none == []


def test_requests_that_cannot_be_served(model, rollout, make_request):
    """Errors name what is wrong, before anything runs.

    Seen to catch: the shape of seeds not checked; ids checked against the padded vocabulary, or not at all."""
    engine, params = model.engine(rollout())
    with pytest.raises(UserError, match="no tokenizer"):
        engine.generate(params, [make_request(3, stop=("x",))])
    with pytest.raises(UserError, match="uint32"):
        engine.generate(params, [dataclasses.replace(make_request(3), seeds=np.zeros(2, np.uint32))])
    with pytest.raises(UserError, match="at most 16"):
        engine.generate(params, [make_request(3, stop_token_ids=tuple(range(20)))])
    with pytest.raises(UserError, match=r"shape \(0,\)"):
        engine.generate(params, [make_request(0)])
    for prompt in ([10, 150], [-1, 10], [10.0, 11.5]):  # 150: a row that only pads the array
        broken = dataclasses.replace(make_request(3), prompt_ids=np.asarray(prompt))
        with pytest.raises(UserError, match="from 0 to 149"):
            engine.generate(params, [make_request(3), broken])
    for name, value in {"temperature": -1.0, "top_p": 0.0, "max_tokens": 0, "min_tokens": 99, "stop": ("",)}.items():
        with pytest.raises(UserError, match=name):
            make_request(3, **{name: value})
    with pytest.raises(UserError, match="num_pages is 3"):
        model.engine(rollout(num_pages=3))
    with pytest.raises(UserError, match="Tensor groups of generation have 4 devices"):
        model.engine(rollout(), MeshConfig(data=1, fsdp=1, tensor=4, pipeline=1))


def test_weights_that_are_not_numbers(model, rollout, make_request):
    """Seen to catch: the check left out; an error that the command line does not know."""
    engine, params = model.engine(rollout())
    broken = jax.tree.map(lambda leaf: leaf * np.float32(np.nan), params)
    with pytest.raises(RunStopped, match=r"request 1, sample 0: .*learning rate .* gradient norm .* \(float32\)"):
        engine.generate(broken, [make_request(3, n=0), make_request(3)])
    assert len(engine.generate(params, [make_request(3)])[0]) == 1


def test_a_cache_larger_than_the_device_is_refused(model, rollout, make_request):
    """Caught: XLA left to ask for it, which the kernel answers by ending the process."""
    engine, params = model.engine(rollout(page_size=2**31 - 1, num_slots=10**6))
    with pytest.raises(UserError, match=r"needs .* GiB on each device, which has .*rollout\.page_size = 2147483647"):
        engine.generate(params, [make_request(3)])


def test_pages_that_fit_the_free_memory_change_no_token(model, rollout, mixed_requests, monkeypatch):
    """Fewer pages than the slots could fill: samples are preempted, and their tokens stay the same; another call after
    a release has as many pages and compiles nothing."""
    options = rollout(num_slots=4)
    plain, params = model.engine(options)
    expected = plain.generate(params, mixed_requests)
    fitted, _ = model.engine(options, fit_pages=True)
    pages = plain.num_pages // 3
    free = int(pages * plain._page_bytes(np.float32) / 0.9) + 8
    monkeypatch.setattr("jaxrl_llm.decoding.engine.free_bytes", lambda device: free)
    found = fitted.generate(params, mixed_requests)
    assert fitted.num_pages == pages < plain.num_pages
    for request, left, right in zip(mixed_requests, expected, found, strict=True):
        model.check_same(request, left, right)
    fitted.release()
    assert fitted._pools is None
    fitted.generate(params, mixed_requests)
    assert fitted.stats.compiles == 0 and fitted.num_pages == pages
    tight, _ = model.engine(options, fit_pages=True)
    monkeypatch.setattr("jaxrl_llm.decoding.engine.free_bytes", lambda device: 0)
    with pytest.raises(UserError, match=r"'dynamic'.*hold 0 pages"):
        tight.generate(params, mixed_requests)
