"""Which samples run, where, and in which pages: continuous batching in plain Python, without jax.

A sample is waiting, running or finished. Each round (one decode dispatch) goes: every running sample gets the
pages its next tokens need, preempting the youngest where pages run out; waiting samples are admitted into free
slots; the engine carries the plan out and reports the tokens. Samples of one prompt on one replica hold the
prompt's full pages together, and each gets its own copy of the last, partly filled page.

The cache of a sample of ``length`` tokens (prompt and response) holds the first ``length - 1``: the last token
is the input of its next decode step. A preempted sample keeps its tokens and its random stream (which depends on
the position only); its cache is computed again on admission.

Everything here is a function of the requests and the sampled tokens, so that all processes plan alike.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.decoding.pages import PageAllocator, pages_for
from jaxrl_llm.decoding.request import SamplingParams
from jaxrl_llm.decoding.stopping import StopStrings


@dataclasses.dataclass(eq=False)
class Sample:
    """One response being made.

    Attributes:
      request, index: position in the caller's list of requests, and in its group.
      max_tokens: most tokens in the response, the context limit included.
      stop_ids: ids that end it. ``stop_strings`` watches its text; None without stop strings.
      tokens, logprobs: the response so far.
      pages: pages it holds, in order; page i caches tokens ``i * page_size …``.
      finish_reason: "" while unfinished.
    """

    request: int
    index: int
    prompt: np.ndarray
    sampling: SamplingParams
    seed: np.ndarray
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    stop_strings: StopStrings | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str = ""
    started_s: float = -1.0
    finished_s: float = -1.0

    @property
    def position(self) -> int:
        """Position of the token to decode next, which is the number of tokens cached."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def last_token(self) -> int:
        return self.tokens[-1] if self.tokens else int(self.prompt[-1])

    def cached_tokens(self) -> np.ndarray:
        """Every token but the last: what its cache must hold before it decodes."""
        return np.concatenate([self.prompt, np.asarray(self.tokens, self.prompt.dtype)])[:-1]

    def receive(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Takes newly decoded tokens, up to the one that ends the response; sets ``finish_reason`` then."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            self.tokens.append(int(token))
            self.logprobs.append(float(logprob))
            stopped = self.stop_strings is not None and self.stop_strings.push(int(token))
            if stopped or token in self.stop_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                return


@dataclasses.dataclass
class Prefill:
    """Tokens to run through the model from position 0, and the pages that receive their keys and values."""

    tokens: np.ndarray
    pages: list[int]


@dataclasses.dataclass
class Prefix:
    """A prompt cached on a replica for the samples of its group that are still to be admitted there."""

    full_pages: list[int]
    last_page: list[int]  # empty or one: the partly filled page, which is copied, never shared


@dataclasses.dataclass(eq=False)
class Group:
    """The samples of one request that were never admitted, and its prompt's pages by replica."""

    waiting: collections.deque[Sample]
    prefixes: dict[int, Prefix] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Plan:
    """One round, per replica. The engine runs ``prefills``, then ``copies`` of pages (source, destination),
    then decodes ``running``."""

    prefills: list[list[Prefill]]
    copies: list[list[tuple[int, int]]]
    running: list[list[Sample]]


class Scheduler:
    """See the module. ``num_pages`` must hold one sample at full length and one page more, or the largest
    sample could never run (the engine checks it)."""

    def __init__(self, *, num_replicas: int, num_slots: int, num_pages: int, page_size: int, tokens_per_dispatch: int):
        self.num_slots = num_slots
        self.page_size = page_size
        self.tokens_per_dispatch = tokens_per_dispatch
        self.allocators = [PageAllocator(num_pages) for _ in range(num_replicas)]
        self.running: list[list[Sample]] = [[] for _ in range(num_replicas)]  # oldest first
        self.preempted: collections.deque[Sample] = collections.deque()
        self.groups: list[Group] = []  # those with samples never admitted, in order of arrival
        self.num_preemptions = 0

    def add(self, samples: Sequence[Sample]) -> None:
        """Queues the samples of one request."""
        self.groups.append(Group(collections.deque(samples)))

    @property
    def num_unfinished(self) -> int:
        waiting = len(self.preempted) + sum(len(group.waiting) for group in self.groups)
        return waiting + sum(len(samples) for samples in self.running)

    def schedule(self) -> Plan:
        """Plans the next round; at least one sample runs while any is unfinished."""
        replicas = range(len(self.allocators))
        plan = Plan([[] for _ in replicas], [[] for _ in replicas], running=[])
        # Samples are spread evenly: a replica takes more only while it has less than its share.
        share = min(self.num_slots, -(-self.num_unfinished // len(replicas)))
        for replica in replicas:
            if not self._extend_running(replica):
                continue  # pages ran out here: admitting now would only preempt again
            while len(self.running[replica]) < share and self._admit_next(replica, plan):
                pass
        if self.num_unfinished and not any(self.running):
            raise RuntimeError("the scheduler made no progress: the KV pool is too small for one sample")
        plan.running = [list(samples) for samples in self.running]
        return plan

    def finish(self, replica: int) -> list[Sample]:
        """Removes and returns the replica's samples that have a ``finish_reason``, and frees their pages."""
        done = [sample for sample in self.running[replica] if sample.finish_reason]
        self.running[replica] = [sample for sample in self.running[replica] if not sample.finish_reason]
        for sample in done:
            self._release_sample(replica, sample)
        return done

    # -- Running samples -----------------------------------------------------------------------------------

    def _pages_needed(self, sample: Sample) -> int:
        """Pages to hold after the next dispatch; the response's very last token is never cached."""
        last = len(sample.prompt) + sample.max_tokens - 1
        return pages_for(min(sample.position + self.tokens_per_dispatch, last), self.page_size)

    def _extend_running(self, replica: int) -> bool:
        """Gives every running sample, oldest first, the pages of its next dispatch. False if some were preempted."""
        allocator = self.allocators[replica]
        undisturbed = True
        extended = 0
        while extended < len(self.running[replica]):
            sample = self.running[replica][extended]
            pages = allocator.allocate(self._pages_needed(sample) - len(sample.pages))
            if pages is not None:
                sample.pages += pages
                extended += 1
            elif not self._drop_prefixes(replica):
                self._preempt(replica, self.running[replica][-1])
                undisturbed = False
        return undisturbed

    def _preempt(self, replica: int, sample: Sample) -> None:
        self.running[replica].remove(sample)
        self._release_sample(replica, sample)
        self.preempted.appendleft(sample)
        self.num_preemptions += 1

    def _release_sample(self, replica: int, sample: Sample) -> None:
        self.allocators[replica].release(sample.pages)
        sample.pages = []

    def _drop_prefixes(self, replica: int) -> bool:
        """Forgets the prompts kept for samples not admitted yet. False if there were none."""
        prefixes = [group.prefixes.pop(replica) for group in self.groups if replica in group.prefixes]
        for prefix in prefixes:
            self.allocators[replica].release(prefix.full_pages + prefix.last_page)
        return bool(prefixes)

    # -- Admission -----------------------------------------------------------------------------------------

    def _admit_next(self, replica: int, plan: Plan) -> bool:
        """Admits one waiting sample; False if there is none or its pages aren't free."""
        if self.preempted:
            if not self._admit_preempted(replica, self.preempted[0], plan):
                return False
            self.preempted.popleft()
            return True
        if not self.groups:
            return False
        cached = (group for group in self.groups if replica in group.prefixes)
        group = next(cached, self.groups[0])
        if self._admit_fresh(replica, group, plan):
            return True
        # An idle replica has to make progress: give up the prompts it keeps, and try once more.
        idle = not self.running[replica]
        return idle and self._drop_prefixes(replica) and self._admit_fresh(replica, group, plan)

    def _admit_preempted(self, replica: int, sample: Sample, plan: Plan) -> bool:
        needed = self._pages_needed(sample)
        pages = self.allocators[replica].allocate(needed)
        if pages is None and not self.running[replica] and self._drop_prefixes(replica):
            pages = self.allocators[replica].allocate(needed)
        if pages is None:
            return False
        sample.pages = pages
        self._plan_prefill(replica, sample.cached_tokens(), pages, plan)
        self.running[replica].append(sample)
        return True

    def _admit_fresh(self, replica: int, group: Group, plan: Plan) -> bool:
        allocator = self.allocators[replica]
        sample = group.waiting[0]
        num_full, rest = divmod(sample.position, self.page_size)
        is_last = len(group.waiting) == 1
        prefix = group.prefixes.get(replica)
        own = self._pages_needed(sample) - num_full  # its copy of the last prompt page, and pages to grow into
        new = own - (1 if rest and is_last else 0)  # the group's last sample takes that page itself
        if prefix is None:
            new += num_full + (1 if rest else 0)
        pages = allocator.allocate(new)
        if pages is None:
            return False
        if prefix is None:
            prefix = Prefix(pages[:num_full], pages[num_full : num_full + bool(rest)])
            pages = pages[num_full + bool(rest) :]
            group.prefixes[replica] = prefix
            self._plan_prefill(replica, sample.cached_tokens(), prefix.full_pages + prefix.last_page, plan)
        if is_last:
            sample.pages = prefix.full_pages + prefix.last_page + pages
            del group.prefixes[replica]
            # Copies from these pages may be planned in this round. Freeing them is safe: a replica allocates in
            # its own turn only, so before the next round nothing else gets them.
            for other, kept in group.prefixes.items():
                self.allocators[other].release(kept.full_pages + kept.last_page)
            self.groups.remove(group)
        else:
            sample.pages = allocator.share(prefix.full_pages) + pages
            plan.copies[replica] += [(page, pages[0]) for page in prefix.last_page]
        group.waiting.popleft()
        self.running[replica].append(sample)
        return True

    def _plan_prefill(self, replica: int, tokens: np.ndarray, pages: list[int], plan: Plan) -> None:
        if len(tokens):  # a prompt of one token has nothing to cache yet
            plan.prefills[replica].append(Prefill(tokens, list(pages[: pages_for(len(tokens), self.page_size)])))
