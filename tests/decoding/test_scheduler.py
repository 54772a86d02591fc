"""The scheduler under random traffic, without a device."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.decoding.pages import pages_for
from jaxrl_llm.decoding.request import SamplingParams
from jaxrl_llm.decoding.scheduler import Sample, Scheduler

PAGE = 4


def group(request, prompt_length, lengths, key=0):
    """Samples that end after the given numbers of tokens."""
    prompt = np.arange(prompt_length, dtype=np.int32) + 100 * request
    return [
        Sample(request, index, prompt, SamplingParams(), np.zeros(2, np.uint32), max_tokens=length)
        for index, length in enumerate(lengths)
    ]


class Cache:
    """A pool that remembers which token of which text each place caches, and checks every read and write."""

    def __init__(self, num_pages):
        self.places = {}
        self.num_pages = num_pages

    def prefill(self, prefill):
        for position in range(len(prefill.tokens)):
            self.places[prefill.pages[position // PAGE], position % PAGE] = tuple(prefill.tokens[: position + 1])

    def copy(self, source, destination):
        for offset in range(PAGE):
            self.places[destination, offset] = self.places.get((source, offset))

    def decode(self, sample, steps):
        text = [*sample.prompt, *sample.tokens]
        for position in range(len(text) - 1):
            want = tuple(text[: position + 1])
            assert self.places[sample.pages[position // PAGE], position % PAGE] == want
        new = [int(1000 * sample.request + 10 * sample.index + len(sample.tokens) + step) for step in range(steps)]
        for step in range(steps):
            position = len(text) - 1
            self.places[sample.pages[position // PAGE], position % PAGE] = tuple(text)
            text.append(new[step])
        return new


def run(groups, *, num_replicas, num_slots, num_pages, tokens_per_dispatch):
    """Serves all groups against the checking cache; returns the scheduler and the most that ran at once."""
    scheduler = Scheduler(
        num_replicas=num_replicas,
        num_slots=num_slots,
        num_pages=num_pages,
        page_size=PAGE,
        tokens_per_dispatch=tokens_per_dispatch,
    )
    for samples in groups:
        scheduler.add(samples)
    caches = [Cache(num_pages) for _ in range(num_replicas)]
    rounds = most = 0
    while scheduler.num_unfinished:
        plan = scheduler.schedule()
        rounds += 1
        assert rounds < 10_000
        for replica, cache in enumerate(caches):
            running = plan.running[replica]
            assert len(running) <= num_slots
            for prefill in plan.prefills[replica]:
                cache.prefill(prefill)
            destinations = [destination for _, destination in plan.copies[replica]]
            assert len(set(destinations)) == len(destinations)
            for source, destination in plan.copies[replica]:
                cache.copy(source, destination)
            for sample in running:
                steps = min(tokens_per_dispatch, sample.max_tokens - len(sample.tokens))
                sample.receive(cache.decode(sample, steps), [0.0] * steps)
            scheduler.finish(replica)
        most = max(most, sum(len(running) for running in plan.running))
    for allocator in scheduler.allocators:
        assert allocator.num_free == num_pages
    assert all(sample.finish_reason == "length" for samples in groups for sample in samples)
    return scheduler, most


@settings(max_examples=150, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 14), st.lists(st.integers(1, 12), min_size=1, max_size=6)), max_size=8),
    num_replicas=st.integers(1, 3),
    num_slots=st.integers(1, 5),
    spare_pages=st.integers(0, 8),
    tokens_per_dispatch=st.integers(1, 7),
)
def test_random_traffic(groups, num_replicas, num_slots, spare_pages, tokens_per_dispatch):
    """Every sample finishes, reads only its own text from the cache, and every page comes back.

    Seen to catch: a last prompt page not copied; pages kept by a group after its last sample; a preempted sample
    cached from its prompt alone; pages for one token too few in a dispatch.
    """
    longest = max([length + max(lengths) for length, lengths in groups], default=2)
    samples = [group(request, length, lengths) for request, (length, lengths) in enumerate(groups)]
    run(
        samples,
        num_replicas=num_replicas,
        num_slots=num_slots,
        num_pages=pages_for(longest, PAGE) + 1 + spare_pages,
        tokens_per_dispatch=tokens_per_dispatch,
    )


def test_slots_are_refilled_while_others_run():
    """Seen to catch: admission only when a whole batch has finished."""
    samples = [group(request, 3, [length]) for request, length in enumerate([40, 2, 2, 2, 2])]
    scheduler = Scheduler(num_replicas=1, num_slots=2, num_pages=64, page_size=PAGE, tokens_per_dispatch=2)
    for one in samples:
        scheduler.add(one)
    for round_number in range(4):
        (running,) = scheduler.schedule().running
        assert [sample.request for sample in running] == [0, round_number + 1]
        for sample in running:
            sample.receive([5, 5], [0.0, 0.0])
        scheduler.finish(0)


def test_a_group_shares_its_full_pages():
    """Prompt of 11: ten cached tokens, two full pages and one to copy. Seen to catch: pages per sample."""
    scheduler = Scheduler(num_replicas=1, num_slots=8, num_pages=64, page_size=PAGE, tokens_per_dispatch=2)
    scheduler.add(group(0, 11, [5] * 4))
    plan = scheduler.schedule()
    assert [len(prefill.tokens) for prefill in plan.prefills[0]] == [10]
    tables = [sample.pages for sample in plan.running[0]]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 4
    assert len(plan.copies[0]) == 3  # the last sample takes the prefilled page itself
    assert 64 - scheduler.allocators[0].num_free == 2 + 4


def test_samples_spread_over_replicas():
    """Two groups of eight on four replicas: four each. Seen to catch: filling the first replica's slots first."""
    scheduler = Scheduler(num_replicas=4, num_slots=8, num_pages=64, page_size=PAGE, tokens_per_dispatch=2)
    for request in range(2):
        scheduler.add(group(request, 5, [4] * 8))
    assert [len(running) for running in scheduler.schedule().running] == [4, 4, 4, 4]


def test_preemption_takes_the_youngest():
    """Seen to catch: preempting the oldest, which can starve it."""
    scheduler = Scheduler(num_replicas=1, num_slots=3, num_pages=6, page_size=PAGE, tokens_per_dispatch=4)
    for request in range(3):
        scheduler.add(group(request, 4, [16]))
    first = []
    while scheduler.num_unfinished:
        (running,) = scheduler.schedule().running
        for sample in running:
            sample.receive([5] * 4, [0.0] * 4)
        first += [sample.request for sample in scheduler.finish(0)]
    assert scheduler.num_preemptions > 0
    assert first[0] == 0


def test_response_ends_where_it_should():
    """T01, T03: the ending token is part of it, nothing after is. Seen to catch: EOS dropped; reading on past it."""
    (sample,) = group(0, 3, [10])
    sample.stop_ids = (2,)
    sample.receive([5, 6, 2, 0, 0], [-1.0] * 5)
    assert (sample.tokens, sample.finish_reason, len(sample.logprobs)) == ([5, 6, 2], "stop", 3)
    (sample,) = group(0, 3, [3])
    sample.receive([5, 6, 7], [-1.0] * 3)
    assert (sample.tokens, sample.finish_reason) == ([5, 6, 7], "length")


def test_too_small_a_pool_is_an_error_and_not_a_loop():
    """Seen to catch: spinning for ever on a sample that can't fit."""
    scheduler = Scheduler(num_replicas=1, num_slots=2, num_pages=1, page_size=PAGE, tokens_per_dispatch=2)
    scheduler.add(group(0, 9, [4]))
    with pytest.raises(RuntimeError, match="too small"):
        scheduler.schedule()
