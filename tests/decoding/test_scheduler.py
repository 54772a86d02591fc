"""The scheduler under random traffic, without a device."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.decoding.pages import PageAllocator, page_keys, pages_for
from jaxrl_llm.decoding.request import SamplingParams
from jaxrl_llm.decoding.rows import bins_of
from jaxrl_llm.decoding.sample import Sample
from jaxrl_llm.decoding.scheduler import Scheduler

PAGE = 4


def make_scheduler(*, num_slots, num_pages, tokens_per_dispatch, num_replicas=1, prefill_tokens=1000):
    return Scheduler(
        [PageAllocator(num_pages) for _ in range(num_replicas)],
        num_slots=num_slots,
        page_size=PAGE,
        tokens_per_dispatch=tokens_per_dispatch,
        prefill_tokens=prefill_tokens,
    )


def group(request, prompt_length, lengths, prompt=None):
    """Samples that end after the given numbers of tokens."""
    prompt = np.arange(prompt_length, dtype=np.int32) + 100 * request if prompt is None else prompt
    return [
        Sample(request, index, prompt, SamplingParams(), np.zeros(2, np.uint32), max_tokens=length)
        for index, length in enumerate(lengths)
    ]


class Cache:
    """A pool that remembers which token of which text each place caches, and checks every read and write."""

    def __init__(self, num_pages):
        self.places = {}
        self.num_pages = num_pages

    def prefill(self, piece):
        """Reads what is cached before the piece, then writes its tokens."""
        text = []
        for position in range(piece.start):
            cached = self.places[piece.pages[position // PAGE], position % PAGE]
            assert list(cached[:-1]) == text
            text = list(cached)
        for position, token in enumerate(piece.tokens, start=piece.start):
            text.append(int(token))
            self.places[piece.pages[position // PAGE], position % PAGE] = tuple(text)

    def copy(self, source, destination):
        for offset in range(PAGE):
            self.places[destination, offset] = self.places.get((source, offset))

    def decode(self, sample, steps):
        text = [*map(int, sample.prompt), *sample.tokens]
        for position in range(len(text) - 1):
            want = tuple(text[: position + 1])
            assert self.places[sample.pages[position // PAGE], position % PAGE] == want
        new = [int(1000 * sample.request + 10 * sample.index + len(sample.tokens) + step) for step in range(steps)]
        for step in range(steps):
            position = len(text) - 1
            self.places[sample.pages[position // PAGE], position % PAGE] = tuple(text)
            text.append(new[step])
        return new


def run(groups, scheduler, caches):
    """Serves all groups against the checking caches; returns the most tokens prefilled beside running samples."""
    for samples in groups:
        scheduler.add(samples)
    rounds = most = 0
    running_before = [False for _ in caches]
    while scheduler.num_unfinished:
        plan = scheduler.schedule()
        rounds += 1
        assert rounds < 10_000
        for replica, cache in enumerate(caches):
            running = plan.running[replica]
            assert len(running) <= scheduler.num_slots
            if running_before[replica]:
                most = max(most, sum(len(piece.tokens) for piece in plan.prefills[replica]))
            for pieces in bins_of(plan.prefills[replica], 5, 1000, PAGE):
                for piece in pieces:
                    cache.prefill(piece)
            destinations = [destination for _, destination in plan.copies[replica]]
            assert len(set(destinations)) == len(destinations)
            for source, destination in plan.copies[replica]:
                cache.copy(source, destination)
            for sample in running:
                steps = min(scheduler.tokens_per_dispatch, sample.max_tokens - len(sample.tokens))
                sample.receive(cache.decode(sample, steps), [0.0] * steps)
            scheduler.finish(replica)
            running_before[replica] = bool(scheduler.running[replica])
    for allocator in scheduler.allocators:
        assert allocator.num_free == allocator.num_pages
    assert all(sample.finish_reason == "length" for samples in groups for sample in samples)
    return most


@settings(max_examples=200, deadline=None)
@given(
    calls=st.lists(
        st.lists(
            st.tuples(st.integers(1, 14), st.integers(0, 2), st.lists(st.integers(1, 12), min_size=1, max_size=6)),
            max_size=8,
        ),
        min_size=1,
        max_size=2,
    ),
    num_replicas=st.integers(1, 3),
    num_slots=st.integers(1, 5),
    spare_pages=st.integers(0, 8),
    tokens_per_dispatch=st.integers(1, 7),
    prefill_tokens=st.integers(1, 20),
)
def test_random_traffic(calls, num_replicas, num_slots, spare_pages, tokens_per_dispatch, prefill_tokens):
    """Every sample finishes, reads only its own text from the cache, and every page comes back. Prompts of one
    beginning share it, also with the call before.

    Seen to catch: a last prompt page not copied; pages kept by a group after its last sample; a preempted sample
    cached from its prompt alone; pages for one token too few in a dispatch; a page named for a token too many; a name
    kept by a page that is handed out again.
    """
    longest = max((length + max(lengths) for groups in calls for length, _, lengths in groups), default=2)
    scheduler = make_scheduler(
        num_replicas=num_replicas,
        num_slots=num_slots,
        num_pages=pages_for(longest, PAGE) + 1 + spare_pages,
        tokens_per_dispatch=tokens_per_dispatch,
        prefill_tokens=prefill_tokens,
    )
    caches = [Cache(allocator.num_pages) for allocator in scheduler.allocators]
    for groups in calls:
        samples = [
            group(request, length, lengths, prompt=np.arange(length, dtype=np.int32) + 100 * beginning)
            for request, (length, beginning, lengths) in enumerate(groups)
        ]
        assert run(samples, scheduler, caches) <= prefill_tokens


def test_prompts_that_begin_alike_are_computed_once():
    """Case K05, and the second turn of a conversation, whose last page is short of one token that was never cached.

    Seen to catch: keys of a page's own tokens alone, which find [C][B] after [A][B] and [C][D]; a page named for a
    token too many."""
    scheduler = make_scheduler(num_slots=8, num_pages=64, tokens_per_dispatch=4)
    cache = Cache(64)
    begin = np.arange(10, dtype=np.int32)
    prompts = [np.concatenate([begin, np.full(3, 50 + n, np.int32)]) for n in range(3)]
    groups = [group(n, 0, [7], prompt=prompt) for n, prompt in enumerate(prompts)]
    run(groups, scheduler, [cache])
    assert scheduler.num_found_tokens == 2 * 8  # two pages of four tokens, by the second and the third
    (first,) = groups[0]
    turn = np.concatenate([prompts[0], np.asarray(first.tokens, np.int32), np.full(5, 70, np.int32)])
    run([group(4, 0, [3], prompt=turn)], scheduler, [cache])
    assert scheduler.num_found_tokens == 16 + 16  # of 13 + 7 tokens, of which 19 were cached
    scheduler.num_found_tokens = 0
    a, b, c, d, end = (np.arange(20 * n, 20 * n + 4, dtype=np.int32) for n in range(10, 15))
    crossed = [np.concatenate([*pages, end]) for pages in ((a, b), (c, d), (c, b))]
    run([group(5 + n, 0, [2], prompt=prompt) for n, prompt in enumerate(crossed)], scheduler, [cache])
    assert scheduler.num_found_tokens == 4
    assert page_keys(turn, PAGE)[:3] == page_keys(turn[:15], PAGE)


def test_the_longest_are_admitted_first():
    """Seen to catch: the order of arrival, which leaves the longest running alone at the end."""
    scheduler = make_scheduler(num_slots=2, num_pages=64, tokens_per_dispatch=2)
    for request, length in enumerate([3, 20, 5, 9]):
        scheduler.add(group(request, 3, [length]))
    (running,) = scheduler.schedule().running
    assert [sample.request for sample in running] == [1, 3]


def test_a_long_prompt_does_not_make_others_wait():
    """Pieces of at most ten tokens beside a running sample, which decodes in every round. Seen to catch: the prompt in
    one piece."""
    scheduler = make_scheduler(num_slots=2, num_pages=64, tokens_per_dispatch=2, prefill_tokens=10)
    scheduler.add(group(0, 5, [40]))
    pieces = []
    for round_number in range(6):
        plan = scheduler.schedule()
        pieces.append([(piece.start, len(piece.tokens)) for piece in plan.prefills[0]])
        assert plan.running[0][0].request == 0
        for sample in plan.running[0]:
            sample.receive([5, 5], [0.0, 0.0])
        if round_number == 0:
            scheduler.add(group(1, 33, [4]))
    assert pieces == [[(0, 4)], [(0, 10)], [(10, 10)], [(20, 10)], [(30, 2)], []]
    assert [sample.request for sample in plan.running[0]] == [0, 1]


def test_slots_are_refilled_while_others_run():
    """Seen to catch: admission only when a whole batch has finished."""
    samples = [group(request, 3, [length]) for request, length in enumerate([40, 2, 2, 2, 2])]
    scheduler = make_scheduler(num_slots=2, num_pages=64, tokens_per_dispatch=2)
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
    scheduler = make_scheduler(num_slots=8, num_pages=64, tokens_per_dispatch=2)
    scheduler.add(group(0, 11, [5] * 4))
    plan = scheduler.schedule()
    assert [len(prefill.tokens) for prefill in plan.prefills[0]] == [10]
    tables = [sample.pages for sample in plan.running[0]]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 4
    assert len(plan.copies[0]) == 3  # the last sample takes the prefilled page itself
    assert 64 - scheduler.allocators[0].num_free == 2 + 4


def test_samples_spread_over_replicas():
    """Two groups of eight on four replicas: four each; and by expected tokens where lengths differ.

    Seen to catch: filling the first replica's slots first; counting samples instead of their tokens."""
    scheduler = make_scheduler(num_replicas=4, num_slots=8, num_pages=64, tokens_per_dispatch=2)
    for request in range(2):
        scheduler.add(group(request, 5, [4] * 8))
    assert [len(running) for running in scheduler.schedule().running] == [4, 4, 4, 4]
    scheduler = make_scheduler(num_replicas=2, num_slots=8, num_pages=64, tokens_per_dispatch=2)
    for request, length in enumerate([30, 10, 10, 10]):
        scheduler.add(group(request, 5, [length]))
    assert [len(running) for running in scheduler.schedule().running] == [1, 3]


def test_preemption_takes_the_youngest():
    """Seen to catch: preempting the oldest, which can starve it."""
    scheduler = make_scheduler(num_slots=3, num_pages=6, tokens_per_dispatch=4)
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
    scheduler = make_scheduler(num_slots=2, num_pages=1, tokens_per_dispatch=2)
    scheduler.add(group(0, 9, [4]))
    with pytest.raises(RuntimeError, match="too small"):
        scheduler.schedule()
