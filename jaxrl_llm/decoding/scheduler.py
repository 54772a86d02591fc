"""Which samples run, where, and in which pages: continuous batching in plain Python, without jax.

A sample is waiting, running or finished. Each round (one decode dispatch) goes, replica by replica: every running
sample gets the pages its next tokens need, preempting the youngest where pages run out; caches that are being filled
go on; waiting samples are admitted into free slots, the longest first, so that no long one runs alone at the end; the
engine carries the plan out and reports the tokens.

The cache of a sample of ``length`` tokens (prompt and response) holds the first ``length - 1``: the last token
is the input of its next decode step. Caches are filled by jobs, in pieces: while samples of a replica decode, its
jobs get at most ``prefill_tokens`` tokens a round, so that a long prompt does not make them wait. Samples of one
prompt on one replica hold the prompt's full pages together, and each gets its own copy of the last, partly filled
page. A job begins with the pages that are found by name (see `pages`): what another prompt that began alike, an
earlier turn or the sample's own life before a preemption left behind. A preempted sample keeps its tokens and its
random stream (which depends on the position only); its cache is filled again on admission.

Everything here is a function of the requests and the sampled tokens, so that all processes plan alike.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.decoding.pages import PageAllocator, page_keys, pages_for
from jaxrl_llm.decoding.sample import Sample


@dataclasses.dataclass
class Prefill:
    """Tokens to run through the model at positions ``start …``.

    ``pages`` are the sequence's from its first on; those before ``start`` are read, the others receive keys and values.
    """

    tokens: np.ndarray
    pages: list[int]
    start: int = 0


@dataclasses.dataclass(eq=False)
class Job:
    """A cache being filled: ``done`` of its tokens are. The pages belong to the job's owner.

    Attributes:
      keys: of its full pages, in order.
      sample: the preempted sample that goes on when it is filled; None for the prompt of a group.
    """

    tokens: np.ndarray
    pages: list[int]
    keys: list[bytes]
    done: int
    sample: Sample | None = None

    @property
    def ready(self) -> bool:
        return self.done == len(self.tokens)


@dataclasses.dataclass(eq=False)
class Group:
    """The samples of one request that were never admitted, and its prompt's cache by replica."""

    waiting: collections.deque[Sample]
    prompts: dict[int, Job] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Plan:
    """One round, per replica. The engine runs ``prefills`` in order, then ``copies`` of pages (source, destination),
    then decodes ``running``."""

    prefills: list[list[Prefill]]
    copies: list[list[tuple[int, int]]]
    running: list[list[Sample]]


class Scheduler:
    """See the module.

    Args:
      allocators: of each replica's pages, all free; names that they hold are trusted. Each must have pages for one
        sample at full length and one more, or the largest sample could never run (the engine checks it).
      queue_while_waiting: see `plan_ahead`.
    """

    def __init__(
        self,
        allocators: Sequence[PageAllocator],
        *,
        num_slots: int,
        page_size: int,
        tokens_per_dispatch: int,
        prefill_tokens: int,
        queue_while_waiting: bool = False,
    ):
        self.allocators = allocators
        self.num_slots = num_slots
        self.page_size = page_size
        self.tokens_per_dispatch = tokens_per_dispatch
        self.prefill_tokens = prefill_tokens
        self.queue_while_waiting = queue_while_waiting
        self.running: list[list[Sample]] = [[] for _ in allocators]  # oldest first
        self.jobs: list[list[Job]] = [[] for _ in allocators]
        self.preempted: collections.deque[Sample] = collections.deque()
        self.groups: list[Group] = []  # those with samples never admitted, the longest first
        self.num_preemptions = 0
        self.num_found_tokens = 0

    def add(self, samples: Sequence[Sample]) -> None:
        """Queues the samples of one request."""
        self.groups.append(Group(collections.deque(samples)))
        self.groups.sort(key=lambda group: -max(sample.remaining for sample in group.waiting))  # stable

    @property
    def _unfinished(self) -> list[Sample]:
        waiting = [sample for group in self.groups for sample in group.waiting]
        refilled = [job.sample for jobs in self.jobs for job in jobs if job.sample is not None]
        return [*self.preempted, *waiting, *refilled, *(sample for samples in self.running for sample in samples)]

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def schedule(self) -> Plan:
        """Plans the next round; at least one sample runs while any is unfinished."""
        replicas = range(len(self.allocators))
        plan = Plan([[] for _ in replicas], [[] for _ in replicas], running=[])
        share = self._share()
        for replica in replicas:
            self._schedule_replica(replica, share, plan)
        if not any(self.running) and self.num_unfinished:
            raise RuntimeError("the scheduler made no progress: the KV pool is too small for one sample")
        plan.running = [list(samples) for samples in self.running]
        return plan

    def _share(self) -> int:
        """Expected work is spread evenly: a replica takes more only while it has less than this."""
        return -(-sum(sample.remaining for sample in self._unfinished) // len(self.allocators))

    def _schedule_replica(self, replica: int, share: int, plan: Plan) -> None:
        """Prompts are dropped only before the round's first piece is planned: what is planned is carried out."""
        idle = not self.running[replica]
        if idle:  # the whole pool for whoever is next; dropped prompts are found by name
            self._drop_prompts(replica)
        undisturbed = self._extend_running(replica)
        budget = math.inf if idle else self.prefill_tokens
        for job in list(self.jobs[replica]):
            budget -= self._advance(replica, job, budget, plan)
        if undisturbed:  # else pages ran out here, and admitting now would only preempt again
            self._admit_waiting(replica, share, budget, plan)

    def _admit_waiting(self, replica: int, share: int, budget: float, plan: Plan, ending: int = 0) -> None:
        """Samples into free slots; those of ``ending`` running samples are free too."""
        while self._load(replica) < share and self._num_slots_taken(replica) - ending < self.num_slots:
            group = next((g for g in self.groups if replica in g.prompts and g.prompts[replica].ready), None)
            if group is not None and not self.preempted:
                if not self._admit(replica, group, plan):
                    break
                continue
            job = self._start_job(replica) if budget > 0 else None
            if job is None:
                break
            budget -= self._advance(replica, job, budget, plan)

    def plan_ahead(self) -> Plan | None:
        """What follows the dispatch that is running and was not read yet, with its pages; None where that one must be
        read first. The samples that it ends are among them: the device leaves those out.

        While samples wait, that is done only with ``queue_while_waiting``: slots of samples that the running dispatch
        ends at their limit are filled at once, a slot that becomes free by a stop id or string a dispatch later, since
        nobody knows of it yet. No sample loses its pages in a round planned ahead.
        """
        waiting = bool(self.groups or self.preempted or any(self.jobs))
        if waiting and not self.queue_while_waiting:
            return None
        running = [[one for one in samples if one.remaining > self.tokens_per_dispatch] for samples in self.running]
        needed = [
            [max(self._pages_needed(one, dispatches=2) - len(one.pages), 0) for one in samples] for samples in running
        ]
        enough = all(sum(more) <= pool.num_free for more, pool in zip(needed, self.allocators, strict=True))
        # A replica where nothing goes on is filled by `schedule`, without a bound on prompts and from the whole pool.
        if not enough or not (all if waiting else any)(running):
            return None
        for samples, counts, allocator in zip(running, needed, self.allocators, strict=True):
            for sample, count in zip(samples, counts, strict=True):
                sample.pages += allocator.allocate(count) or []
        plan = Plan([[] for _ in running], [[] for _ in running], running)
        if waiting:
            share = self._share()
            for replica in range(len(running)):
                self._fill_ahead(replica, share, plan)
        return plan

    def _fill_ahead(self, replica: int, share: int, plan: Plan) -> None:
        """Adds prompts to fill and samples to begin to a round that goes on with ``plan.running``."""
        known = set(self.running[replica])
        budget: float = self.prefill_tokens
        for job in list(self.jobs[replica]):
            budget -= self._advance(replica, job, budget, plan)
        self._admit_waiting(replica, share, budget, plan, ending=len(known) - len(plan.running[replica]))
        plan.running[replica] += [sample for sample in self.running[replica] if sample not in known]

    def finish(self, replica: int) -> list[Sample]:
        """Removes and returns the replica's samples that have a ``finish_reason``, and frees their pages."""
        done = [sample for sample in self.running[replica] if sample.finish_reason]
        self.running[replica] = [sample for sample in self.running[replica] if not sample.finish_reason]
        for sample in done:
            self._release_sample(replica, sample)
        return done

    # -- Running samples -----------------------------------------------------------------------------------

    def _pages_needed(self, sample: Sample, dispatches: int = 1) -> int:
        """Pages to hold after so many more dispatches; the response's very last token is never cached."""
        last = len(sample.prompt) + sample.max_tokens - 1
        return pages_for(min(sample.position + dispatches * self.tokens_per_dispatch, last), self.page_size)

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
            elif not self._drop_prompts(replica):
                self._preempt(replica)
                undisturbed = False
        return undisturbed

    def _preempt(self, replica: int) -> None:
        """Takes the pages of the youngest: of a sample whose cache is being filled again, else of a running one."""
        refilled = [(job, job.sample) for job in self.jobs[replica] if job.sample is not None]
        if refilled:
            job, sample = refilled[-1]
            self.jobs[replica].remove(job)
            self.allocators[replica].release(sample.pages)  # named as far as they were filled
            sample.pages = []
        else:
            sample = self.running[replica].pop()
            self._release_sample(replica, sample)
        self.preempted.appendleft(sample)
        self.num_preemptions += 1

    def _release_sample(self, replica: int, sample: Sample) -> None:
        """Frees the pages of a sample whose cache is filled, and names the full ones."""
        allocator = self.allocators[replica]
        for page, key in zip(sample.pages, page_keys(sample.cached_tokens(), self.page_size), strict=False):
            allocator.name(page, key)
        allocator.release(sample.pages)
        sample.pages = []

    def _drop_prompts(self, replica: int) -> bool:
        """Forgets the prompts kept for samples not admitted yet. False if there were none."""
        dropped = [group.prompts.pop(replica) for group in self.groups if replica in group.prompts]
        for job in dropped:
            self._end_prompt(replica, job)
        return bool(dropped)

    def _end_prompt(self, replica: int, job: Job) -> None:
        self.allocators[replica].release(job.pages)
        if not job.ready:
            self.jobs[replica].remove(job)

    # -- Filling caches ------------------------------------------------------------------------------------

    def _advance(self, replica: int, job: Job, budget: float, plan: Plan) -> int:
        """Plans the next piece of a job, of at most ``budget`` tokens; returns how many."""
        count = int(min(len(job.tokens) - job.done, max(budget, 0)))
        end = job.done + count
        if count:
            pages = job.pages[: pages_for(end, self.page_size)]
            plan.prefills[replica].append(Prefill(job.tokens[job.done : end], pages, job.done))
        for index in range(job.done // self.page_size, end // self.page_size):
            self.allocators[replica].name(job.pages[index], job.keys[index])
        job.done = end
        if job.ready and job in self.jobs[replica]:
            self.jobs[replica].remove(job)
            if job.sample is not None:
                self.running[replica].append(job.sample)
        return count

    def _start_job(self, replica: int) -> Job | None:
        """A job for the sample or the group that is next; None if there is none or its pages aren't free."""
        if self.preempted:
            sample = self.preempted[0]
            job = self._open(replica, sample.cached_tokens(), self._pages_needed(sample))
            if job is not None:
                self.preempted.popleft()
                job.sample, sample.pages = sample, job.pages
        else:
            group = next((group for group in self.groups if replica not in group.prompts), None)
            if group is None:
                return None
            tokens = group.waiting[0].cached_tokens()
            own = self._own_pages(group, tokens)
            job = self._open(replica, tokens, pages_for(len(tokens), self.page_size), spare=own)
            if job is not None:
                group.prompts[replica] = job
        if job is not None:
            self.jobs[replica].append(job)
        return job

    def _open(self, replica: int, tokens: np.ndarray, num_pages: int, spare: int = 0) -> Job | None:
        """A job with ``num_pages`` pages, those found by name first, if ``spare`` more stay free."""
        allocator = self.allocators[replica]
        keys = page_keys(tokens, self.page_size)
        found = allocator.find(keys)
        rest = num_pages - len(found)
        pages = allocator.allocate(rest) if rest + spare <= allocator.num_free else None
        if pages is None:
            allocator.release(found)
            return None
        done = len(found) * self.page_size
        self.num_found_tokens += done
        return Job(tokens, found + pages, keys, done)

    # -- Admission -----------------------------------------------------------------------------------------

    def _load(self, replica: int) -> int:
        """Most tokens that the replica's samples can still make."""
        refilled = (job.sample for job in self.jobs[replica] if job.sample is not None)
        return sum(sample.remaining for sample in (*self.running[replica], *refilled))

    def _num_slots_taken(self, replica: int) -> int:
        return len(self.running[replica]) + sum(job.sample is not None for job in self.jobs[replica])

    def _own_pages(self, group: Group, tokens: np.ndarray) -> int:
        """New pages for the group's next sample: its copy of the last prompt page, and pages to grow into. The group's
        last sample takes that page itself."""
        num_full, rest = divmod(len(tokens), self.page_size)
        is_last = len(group.waiting) == 1
        return self._pages_needed(group.waiting[0]) - num_full - (1 if rest and is_last else 0)

    def _admit(self, replica: int, group: Group, plan: Plan) -> bool:
        """Admits a sample of a group whose prompt is cached here; False if its pages aren't free."""
        allocator, prompt = self.allocators[replica], group.prompts[replica]
        num_full = len(prompt.tokens) // self.page_size
        pages = allocator.allocate(self._own_pages(group, prompt.tokens))
        if pages is None:
            return False
        sample = group.waiting.popleft()
        if group.waiting:
            sample.pages = allocator.share(prompt.pages[:num_full]) + pages
            plan.copies[replica] += [(page, pages[0]) for page in prompt.pages[num_full:]]
        else:
            sample.pages = prompt.pages + pages
            del group.prompts[replica]
            # Copies from these pages may be planned in this round. Freeing them is safe: a replica allocates in
            # its own turn only, so before the next round nothing else gets them.
            for other, kept in group.prompts.items():
                self._end_prompt(other, kept)
            self.groups.remove(group)
        self.running[replica].append(sample)
        return True
