"""Dispatches queued before the tokens of the last one are read: nobody can tell from what comes out."""

import collections
import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.config import MeshConfig
from jaxrl_llm.decoding.host_clock import HostClock
from jaxrl_llm.decoding.pages import PageAllocator, page_keys, pages_for
from jaxrl_llm.decoding.request import SamplingParams
from jaxrl_llm.decoding.sample import Sample
from jaxrl_llm.decoding.scheduler import Scheduler
from jaxrl_llm.decoding.stopping import StopStrings
from jaxrl_llm.observability.timing import CompileCounter
from tests.decoding.test_engine import Letters

PAGE = 4
STOP = 1


class Ending(StopStrings):
    """Stands for a stop string that is complete with the n-th token."""

    def __init__(self, count):
        self.left = count

    def push(self, token):
        self.left -= 1
        return self.left == 0


class Device:
    """Runs programs in the order they are queued. Its places remember the text up to and with the token that they
    cache; its rows go on from the host's tokens, or from where they ended."""

    def __init__(self):
        self.places = {}
        self.progress = {}

    def read(self, pages, position):
        return self.places[pages[position // PAGE], position % PAGE]

    def write(self, pages, text):
        self.places[pages[(len(text) - 1) // PAGE], (len(text) - 1) % PAGE] = tuple(text)

    def fill(self, prefills, copies):
        for piece in prefills:
            text = () if piece.start == 0 else self.read(piece.pages, piece.start - 1)
            for token in piece.tokens.tolist():
                text = (*text, token)
                self.write(piece.pages, text)
        for source, destination in copies:
            for offset in range(PAGE):
                self.places[destination, offset] = self.places.get((source, offset))

    def decode(self, samples, most, ahead):
        """The tokens of each sample, at most ``most``."""
        before, self.progress, made = self.progress, {}, []
        for sample in samples:
            text, tokens = [*sample.prompt.tolist(), *sample.tokens], list(sample.tokens)
            active = True
            if ahead and sample in before:
                text, tokens, active = before[sample]
            new = []
            while active and len(new) < most:
                for position in range(len(text) - 1):
                    assert self.read(sample.pages, position) == tuple(text[: position + 1])
                self.write(sample.pages, text)
                token = STOP if len(tokens) + 1 == sample.seed[0] else 100 + 7 * sample.request + sample.index
                text, tokens, new = [*text, token], [*tokens, token], [*new, token]
                active = token not in sample.stop_ids and len(tokens) < sample.max_tokens
            self.progress[sample] = text, tokens, active
            made.append(new)
        return made


def make_samples(groups):
    """Each sample ends at its limit, at a stop id after so many tokens, or at a stop string; 0 is never."""
    return [
        [
            Sample(
                request,
                index,
                np.arange(length, dtype=np.int32) + 100 * request,
                SamplingParams(),
                np.array([by_id, 0], np.uint32),
                max_tokens=limit,
                stop_ids=(STOP,),
                stop_strings=Ending(by_string) if by_string else None,
            )
            for index, (limit, by_id, by_string) in enumerate(ends)
        ]
        for request, (length, ends) in enumerate(groups)
    ]


def serve(groups, num_slots, num_pages, most, queue, queue_while_waiting=False, replicas=1):
    """The loop of `Engine.generate`; returns the samples, the scheduler and how often a dispatch was queued ahead."""
    samples = make_samples(groups)
    scheduler = Scheduler(
        [PageAllocator(num_pages) for _ in range(replicas)],
        num_slots=num_slots,
        page_size=PAGE,
        tokens_per_dispatch=most,
        prefill_tokens=9,
        queue_while_waiting=queue_while_waiting,
    )
    devices = [Device() for _ in range(replicas)]
    for group in samples:
        scheduler.add(group)

    def dispatch(plan, ahead):
        made = []
        for device, *of_replica, running in zip(devices, plan.prefills, plan.copies, plan.running, strict=True):
            assert len(running) <= num_slots
            device.fill(*of_replica)
            made += zip(running, device.decode(running, most, ahead), strict=True)
        return made

    ahead, queued = None, 0
    while scheduler.num_unfinished:
        made, ahead = ahead or dispatch(scheduler.schedule(), ahead=False), None
        following = scheduler.plan_ahead() if queue else None
        if following is not None:
            queued += 1
            ahead = dispatch(following, ahead=True)
        for sample, new in made:
            if not sample.finish_reason:
                assert new
                sample.receive(new, [0.0] * len(new))
        for replica in range(replicas):
            scheduler.finish(replica)
    for allocator, device in zip(scheduler.allocators, devices, strict=True):
        check_names(samples, allocator, device)
        assert allocator.num_free == num_pages
    return samples, scheduler, queued


def check_names(samples, allocator, device):
    """A page that has a name caches the tokens that the name stands for, and some sample's."""
    texts = {
        key: tuple(text[: (index + 1) * PAGE])
        for group in samples
        for sample in group
        for text in [sample.cached_tokens().tolist()]
        for index, key in enumerate(page_keys(np.asarray(text, np.int32), PAGE))
    }
    for key, page in allocator._pages.items():
        assert device.places[page, PAGE - 1] == texts[key]


ENDS = st.tuples(st.integers(1, 30), st.integers(0, 20), st.integers(0, 20))


@settings(max_examples=150, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 10), st.lists(ENDS, min_size=1, max_size=4)), min_size=1, max_size=4),
    num_slots=st.integers(1, 6),
    spare_pages=st.integers(0, 12),
    most=st.integers(1, 6),
)
def test_random_traffic(groups, num_slots, spare_pages, most):
    """Tokens, ends, preemptions and pages, in pools of any size, with limits, stop ids and stop strings.

    Caught: pages for one dispatch too few; pages taken that aren't free; rows planned ahead while samples wait (another
    order, other preemptions); a page fewer given back than held.
    """
    longest = max(length + limit for length, ends in groups for limit, _, _ in ends)
    num_pages = pages_for(longest, PAGE) + 1 + spare_pages
    plain, plainly, _ = serve(groups, num_slots, num_pages, most, queue=False)
    queued, queueing, _ = serve(groups, num_slots, num_pages, most, queue=True)
    for a, b in zip(itertools.chain(*plain), itertools.chain(*queued), strict=True):
        assert (a.tokens, a.finish_reason) == (b.tokens, b.finish_reason)
    assert queueing.num_preemptions == plainly.num_preemptions
    assert queueing.num_found_tokens == plainly.num_found_tokens
    if num_pages > sum(pages_for(length + limit, PAGE) + 1 for length, ends in groups for limit, _, _ in ends):
        assert queueing.allocators[0]._pages.keys() == plainly.allocators[0]._pages.keys()


@settings(max_examples=150, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 10), st.lists(ENDS, min_size=1, max_size=4)), min_size=1, max_size=5),
    num_slots=st.integers(1, 4),
    spare_pages=st.integers(0, 12),
    most=st.integers(1, 6),
    replicas=st.integers(1, 2),
)
def test_random_traffic_queued_while_samples_wait(groups, num_slots, spare_pages, most, replicas):
    """The tokens of every sample are the same, every page has its name's content and is given back, whatever ran when.

    Caught: more samples than slots; pages for one dispatch too few.
    """
    longest = max(length + limit for length, ends in groups for limit, _, _ in ends)
    num_pages = pages_for(longest, PAGE) + 1 + spare_pages
    plain, _, _ = serve(groups, num_slots, num_pages, most, queue=False)
    queued, _, _ = serve(groups, num_slots, num_pages, most, queue=True, queue_while_waiting=True, replicas=replicas)
    for a, b in zip(itertools.chain(*plain), itertools.chain(*queued), strict=True):
        assert (a.tokens, a.finish_reason) == (b.tokens, b.finish_reason)


def waiting_scheduler(samples, num_slots, replicas, queue_while_waiting=True):
    scheduler = Scheduler(
        [PageAllocator(40) for _ in range(replicas)],
        num_slots=num_slots,
        page_size=PAGE,
        tokens_per_dispatch=4,
        prefill_tokens=9,
        queue_while_waiting=queue_while_waiting,
    )
    for group in samples:
        scheduler.add(group)
    return scheduler


def test_a_slot_whose_sample_ends_at_its_limit_is_filled_at_once():
    """Caught: the slot of an ending sample taken for a running one; samples that begin left out of the round; a round
    queued while samples wait, without the rule."""
    (long,), (ending,), (late,) = samples = make_samples([(3, [(12, 0, 0)]), (3, [(4, 0, 0)]), (3, [(4, 0, 0)])])
    scheduler = waiting_scheduler(samples, num_slots=2, replicas=1)
    assert scheduler.schedule().running == [[long, ending]]
    following = scheduler.plan_ahead()
    assert following is not None and following.running == [[long, late]]
    scheduler = waiting_scheduler(
        make_samples([(3, [(12, 0, 0)] * 3)]), num_slots=2, replicas=1, queue_while_waiting=False
    )
    scheduler.schedule()
    assert scheduler.plan_ahead() is None


def test_no_round_is_queued_where_nothing_goes_on():
    """Five samples of one dispatch each, through one slot. Caught: rounds queued that only begin samples."""
    _, _, queued = serve([(3, [(4, 0, 0)])] * 5, 1, 40, 4, queue=True, queue_while_waiting=True)
    assert queued == 0


def test_a_replica_where_nothing_goes_on_is_filled_without_a_bound():
    """Its prompt of 30 tokens at once, though rounds beside others fill 9. Caught: a round queued for the other replica
    alone, which leaves this one waiting for the pieces."""
    (long,), (ending,), (late,) = samples = make_samples([(3, [(40, 0, 0)]), (3, [(20, 0, 0)]), (30, [(10, 0, 0)])])
    scheduler = waiting_scheduler(samples, num_slots=1, replicas=2)
    assert scheduler.schedule().running == [[long], [ending]]
    following = scheduler.plan_ahead()
    assert following is not None and following.running == [[long], [ending]]
    long.receive([100] * 4, [0.0] * 4)
    ending.receive([STOP], [0.0])
    assert scheduler.finish(1) == [ending]
    assert scheduler.plan_ahead() is None
    assert scheduler.schedule().running == [[long], [late]]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_host_seconds_are_those_without_a_program():
    """Caught: the wait counted; all of the host's time; the launch left out."""
    clock, idle = Clock(), True
    host = HostClock(lambda: idle, clock)
    clock.now += 1  # before the first program
    with host.queueing():
        clock.now += 2  # its launch: nothing runs yet
    idle = False
    clock.now += 4  # beside it
    with host.waiting():
        clock.now += 8
    idle = True
    clock.now += 16  # after it, and before the next
    with host.queueing():
        pass
    idle = False
    with host.queueing():  # behind that one
        clock.now += 32
    idle = True
    clock.now += 64  # both have ended some time in here
    with host.waiting():
        clock.now += 128
    clock.now += 256
    assert host.stop() == 1 + 2 + 16 + 64 + 256


# -- The engine ----------------------------------------------------------------------------------------------


@pytest.fixture
def unqueued(monkeypatch):
    """Turns queueing ahead off for what is called with it."""

    def call(function, *arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "plan_ahead", lambda self: None)
            return function(*arguments, **options)

    return call


def events_of(engine, monkeypatch):
    """Fills a list with "q" for each dispatch that is queued and "r" for each that is read."""
    events = []

    def noting(letter, function):
        def call(*arguments):
            events.append(letter)
            return function(*arguments)

        return call

    monkeypatch.setattr(engine, "_decode", noting("q", engine._decode))
    monkeypatch.setattr(engine, "_receive", noting("r", engine._receive))
    return events


@pytest.fixture(scope="module")
def one_slot(model, rollout):
    """An engine that serves one sample at a time, and its parameters."""
    return model.engine(rollout(num_slots=1))


def test_the_next_dispatch_is_queued_before_the_last_is_read(one_slot, make_request, monkeypatch):
    """Except while samples wait, or where no sample can go on.

    Caught: rows that are sure to have ended queued once more; rows queued while samples wait.
    """
    engine, params = one_slot
    events = events_of(engine, monkeypatch)
    engine.generate(params, [make_request(5, n=1, max_tokens=12, ignore_eos=True)])
    assert "".join(events) == "qqrqrr"
    events.clear()
    engine.generate(params, [make_request(5, n=2, max_tokens=12, ignore_eos=True)])
    assert "".join(events) == "qrqrqr" + "qqrqrr"


def random_requests(random, make_request):
    """Groups that end at a limit, an id or a string."""
    return [
        make_request(
            int(random.integers(1, 24)),
            n=int(random.integers(1, 4)),
            key=key,
            max_tokens=int(random.integers(1, 36)),
            temperature=float(random.choice([0.0, 1.0, 2.0])),
            ignore_eos=bool(random.integers(2)),
            stop=tuple("".join(random.choice(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), size)) for size in (1, 2, 2)),
        )
        for key in range(4)
    ]


@pytest.mark.parametrize("replicas", [1, 2])
def test_queued_while_samples_wait_the_engine_gives_the_same(
    model, rollout, make_request, monkeypatch, unqueued, replicas
):
    """The rule for GPUs, on CPUs: random traffic in few slots. Prompts are then computed in other company, which rounds
    otherwise. Caught: samples that start in such a round taken for idle or for another's; its prefill left out."""
    mesh = MeshConfig(data=replicas, fsdp=1, tensor=1, pipeline=1)
    engine, params = model.engine(rollout(num_slots=2, tokens_per_dispatch=3), mesh, tokenizer=Letters())
    assert not engine.queue_while_waiting
    begun, fill = [], Scheduler._fill_ahead

    def noting(self, replica, share, plan):
        going_on = len(plan.running[replica])
        fill(self, replica, share, plan)
        begun.append(len(plan.running[replica]) - going_on)

    monkeypatch.setattr(Scheduler, "_fill_ahead", noting)
    for seed in range(3):
        requests = random_requests(np.random.default_rng(seed), make_request)
        requests.append(make_request(5, n=3, key=9, max_tokens=40, ignore_eos=True))  # beside which others begin
        plain = unqueued(engine.generate, params, requests)
        monkeypatch.setattr(engine, "queue_while_waiting", True)
        queued = engine.generate(params, requests)
        monkeypatch.setattr(engine, "queue_while_waiting", False)
        assert all(allocator.num_free == allocator.num_pages for allocator in engine._allocators)
        for request, left, right in zip(requests, plain, queued, strict=True):
            model.check_same(request, left, right)
            assert [one.text for one in left] == [one.text for one in right]
    assert sum(begun) > 0


@pytest.mark.parametrize(("replicas", "num_pages"), [(1, 20), (2, 17)])
def test_nobody_can_tell(model, rollout, make_request, monkeypatch, unqueued, replicas, num_pages):
    """Random traffic with and without queueing ahead, in pools where samples lose their pages: equal to the bit, the
    text that is shown as it grows too.

    Caught: tokens that were made past a stop string; a queued row that starts with the host's token or count of
    tokens, or from another row; pages for one dispatch too few.
    """
    mesh = MeshConfig(data=replicas, fsdp=1, tensor=1, pipeline=1)
    engine, params = model.engine(
        rollout(num_slots=8, num_pages=num_pages, tokens_per_dispatch=3), mesh, tokenizer=Letters()
    )
    events = events_of(engine, monkeypatch)
    ahead = stopped = preemptions = 0

    def serve(requests):
        shown = collections.defaultdict(str)

        def show(request, index, text):
            shown[request, index] += text

        return engine.generate(params, requests, on_text=show), shown

    for seed in range(5):
        requests = random_requests(np.random.default_rng(seed), make_request)
        plain, plainly_shown = unqueued(serve, requests)
        assert "qq" not in "".join(events)
        events.clear()
        preempted = engine.stats.preemptions
        queued, shown = serve(requests)
        ahead += "".join(events).count("qq")
        events.clear()
        assert engine.stats.preemptions == preempted
        assert all(allocator.num_free == num_pages for allocator in engine._allocators)
        for number, (left, right) in enumerate(zip(plain, queued, strict=True)):
            for index, (a, b) in enumerate(zip(left, right, strict=True)):
                np.testing.assert_array_equal(a.token_ids, b.token_ids)
                np.testing.assert_array_equal(a.logprobs, b.logprobs)
                assert (a.text, a.finish_reason) == (b.text, b.finish_reason)
                assert shown[number, index] == plainly_shown[number, index] == b.text
                stopped += b.finish_reason == "stop"
        assert engine.stats.tokens == sum(len(one.token_ids) for group in queued for one in group)
        preemptions += preempted
    assert ahead > 3 and stopped > 10 and preemptions > 0


def test_work_of_the_host_between_dispatches_is_counted(one_slot, make_request):
    """Of three rounds with nothing queued ahead. Caught: a device that never counts as idle."""
    engine, params = one_slot
    requests = [make_request(3, n=3, max_tokens=5)]
    for _ in range(2):  # the first compiles
        engine.generate(params, requests)
    before = engine.stats.host_s
    engine.generate(params, requests, progress=lambda done, total: time.sleep(0.2))
    stats = engine.stats
    assert stats.dispatches == 3
    assert 0.6 < stats.host_s < stats.seconds
    assert before < 0.6


def test_row_steps_and_decode_alone_are_counted(one_slot, model, rollout, make_request):
    """Two samples in four rows: 2 x 12 tokens in three dispatches of 5, 5 and 2 steps, the first behind the prefill.
    Caught: a row that is idle or has ended counted as work; the seconds of prefill among those of decode."""
    engine, params = model.engine(rollout(num_slots=4))
    engine.generate(
        params, [make_request(5, max_tokens=7, ignore_eos=True), make_request(6, max_tokens=12, ignore_eos=True)]
    )
    stats = engine.stats
    assert (stats.decode_steps, stats.row_steps, stats.made_tokens) == (12, 48, 19)
    assert stats.wasted_fraction == pytest.approx(1 - 19 / 48)
    assert stats.decode_tokens == 19 - 2 * 5
    assert 0 < stats.decode_s < stats.seconds
    assert stats.decode_tokens_per_s == pytest.approx(9 / stats.decode_s)
    engine, params = one_slot
    engine.generate(params, [make_request(5, max_tokens=5, ignore_eos=True)])
    assert (engine.stats.decode_tokens, engine.stats.decode_tokens_per_s) == (0, 0.0)


def test_ragged_traffic(model, rollout, make_request):
    """200 requests of random lengths, one to three samples each, in a pool for a few of them, after `warmup`: nothing
    compiles, every response has its length, no page is lost, and company changes no token.

    Caught: a program left out of the warm-up; a page kept; randomness from the row of the batch.
    """
    random = np.random.default_rng(0)
    requests = [
        make_request(
            int(random.integers(1, 40)),
            n=int(random.integers(1, 4)),
            key=key,
            max_tokens=int(random.integers(1, 25)),
            ignore_eos=True,
        )
        for key in range(200)
    ]
    engine, params = model.engine(rollout(num_slots=8, num_pages=40, tokens_per_dispatch=8, prefill_tokens=64))
    engine.warmup(params)
    with CompileCounter() as counter:
        completions = engine.generate(params, requests)
        assert counter.count == 0
    stats = engine.stats
    assert stats.preemptions > 0
    assert [len(group) for group in completions] == [len(request.seeds) for request in requests]
    for request, group in zip(requests, completions, strict=True):
        for completion in group:
            assert len(completion.token_ids) == request.sampling.max_tokens
            assert completion.finish_reason == "length"
    (allocator,) = engine._allocators
    assert allocator.num_free == 40 and not any(allocator.holders(page) for page in range(40))
    for index in range(0, 200, 25):
        (alone,) = engine.generate(params, [requests[index]])
        model.check_same(requests[index], alone, completions[index])
