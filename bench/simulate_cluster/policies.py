"""Routers' policies for choosing a worker, reimplemented from public sources; each class names its source.

- smg (Shepherd Model Gateway) 1.9.0, github.com/lightseekorg/smg at 73da68ca9: `model_gateway/src/policies`
  and `crates/kv_index`; defaults of its command line.
- llm-d-router, github.com/llm-d/llm-d-inference-scheduler at 520af478 (after v0.8.0): `pkg/epp`; its default
  configuration (`config/loader/defaults.go`), the same as that of the Gateway API Inference Extension.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from bench.simulate_cluster.prefix_store import CONVERSATION, GROUP, Key, PrefixStore
from bench.simulate_cluster.worker import Job, Worker


class Cluster:
    """A router's view of the workers: its own counts, and scraped metrics."""

    def __init__(self, workers: list[Worker], scrape_interval_s: float = 0.05) -> None:
        self.workers = workers
        self.in_flight = np.zeros(len(workers), np.int64)  # requests sent by the router that have not ended
        self.processed = np.zeros(len(workers), np.int64)  # requests sent by the router
        self._scrape_interval_s = scrape_interval_s
        self._scraped_s = -np.inf
        self._scraped = np.zeros((2, len(workers)))

    def scraped(self, now: float) -> tuple[np.ndarray, np.ndarray]:
        """Return each worker's waiting requests and KV cache usage (a share) as last scraped."""
        if now - self._scraped_s >= self._scrape_interval_s:
            self._scraped[0] = [worker.num_waiting for worker in self.workers]
            self._scraped[1] = [worker.usage for worker in self.workers]
            self._scraped_s = now
        return self._scraped[0], self._scraped[1]

    def part(self, begin: int, end: int) -> Cluster:
        """Return a cluster of some of the workers that shares this one's counts."""
        part = Cluster(self.workers[begin:end], self._scrape_interval_s)
        part.in_flight, part.processed = self.in_flight[begin:end], self.processed[begin:end]
        return part

    def least_loaded(self) -> int:
        """Return the worker with the fewest requests in flight, then fewest sent, then lowest number."""
        return int(np.argmin((self.in_flight << 32) + self.processed))


class Policy(ABC):
    def __init__(self, cluster: Cluster, rng: np.random.Generator) -> None:
        self.cluster = cluster
        self.rng = rng
        self.num_workers = len(cluster.workers)

    @abstractmethod
    def choose(self, job: Job, now: float) -> int:
        """Return the worker for the request."""


class RoundRobin(Policy):
    """Choose workers in turn: smg's `round_robin`, or a load balancer unaware of prompts."""

    _next = -1

    def choose(self, job: Job, now: float) -> int:
        self._next = (self._next + 1) % self.num_workers
        return self._next


class LeastLoaded(Policy):
    """Choose the worker with the fewest requests in flight: smg's shortest queue."""

    def choose(self, job: Job, now: float) -> int:
        return self.cluster.least_loaded()


class HashRing:
    """smg's hash ring: 150 places per worker; a key belongs to the next place clockwise.

    Places are BLAKE2 hashes, where smg uses BLAKE3.
    """

    PLACES = 150

    def __init__(self, num_workers: int) -> None:
        places = sorted(
            (_place(f"http://worker-{worker}:8000#{place}"), worker)
            for worker in range(num_workers)
            for place in range(self.PLACES)
        )
        self._places = [place for place, _ in places]
        self._workers = [worker for _, worker in places]

    def worker_of(self, key: str) -> int:
        return self._workers[bisect_left(self._places, _place(key)) % len(self._places)]


class Session(Policy):
    """smg's `consistent_hashing` with the conversation as `X-SMG-Routing-Key`."""

    def __init__(self, cluster: Cluster, rng: np.random.Generator) -> None:
        super().__init__(cluster, rng)
        self._ring = HashRing(self.num_workers)

    def choose(self, job: Job, now: float) -> int:
        return self._ring.worker_of(f"conversation-{job.conversation}")


class PrefixHash(Policy):
    """smg's `prefix_hash`: a ring keyed by the hash of the first 256 tokens, here the group's.

    A worker with more than 1.25 times the average load passes the request on to the least loaded one.
    """

    LOAD_FACTOR = 1.25

    def __init__(self, cluster: Cluster, rng: np.random.Generator) -> None:
        super().__init__(cluster, rng)
        self._ring = HashRing(self.num_workers)
        self._of_group: dict[int, int] = {}

    def choose(self, job: Job, now: float) -> int:
        if job.group not in self._of_group:
            self._of_group[job.group] = self._ring.worker_of(f"group-{job.group}")
        chosen, loads = self._of_group[job.group], self.cluster.in_flight
        total = int(loads.sum())
        if not total or loads[chosen] <= (total + 1) / self.num_workers * self.LOAD_FACTOR:
            return chosen
        least = int(np.argmin(loads))
        return least if loads[least] <= (total + 1) / self.num_workers * self.LOAD_FACTOR else chosen


class CacheAware(Policy):
    """smg's `cache_aware` over HTTP: an approximate tree of the texts that were sent.

    If the most loaded worker has over 64 requests more than the least loaded one, and over 1.5 times as many,
    the least loaded one is chosen. Otherwise, if more than 0.3 of the prompt is in the tree, the worker that
    created the deepest matching node is chosen. That is the conversation's last worker, or for a new
    conversation the worker of an earlier one of its group with a similar start of the question, here drawn at
    random. Otherwise the least loaded one is chosen. The tree's eviction (from 2**26 characters per worker)
    is not modelled, as no run comes near it.
    """

    CACHE_THRESHOLD = 0.3
    BALANCE_ABS_THRESHOLD = 64
    BALANCE_REL_THRESHOLD = 1.5

    def __init__(self, cluster: Cluster, rng: np.random.Generator) -> None:
        super().__init__(cluster, rng)
        self._of_group: dict[int, list[int]] = {}  # the worker of each conversation's first prompt
        self._of_conversation: dict[int, tuple[int, int]] = {}  # the worker, and the tokens sent

    def choose(self, job: Job, now: float) -> int:
        chosen = self._choose(job)
        if job.conversation not in self._of_conversation:
            self._of_group.setdefault(job.group, []).append(chosen)
        self._of_conversation[job.conversation] = chosen, job.prompt_tokens
        return chosen

    def _choose(self, job: Job) -> int:
        loads = self.cluster.in_flight
        least, most = int(loads.min()), int(loads.max())
        if most - least > self.BALANCE_ABS_THRESHOLD and most > self.BALANCE_REL_THRESHOLD * least:
            return self.cluster.least_loaded()
        owner, matched = self._deepest_match(job)
        return owner if matched > self.CACHE_THRESHOLD * job.prompt_tokens else self.cluster.least_loaded()

    def _deepest_match(self, job: Job) -> tuple[int, int]:
        """Return the worker that created the deepest matching node, and the number of matching tokens."""
        if known := self._of_conversation.get(job.conversation):
            return known
        if earlier := self._of_group.get(job.group):
            return earlier[int(self.rng.random() * len(earlier))], job.prefix_tokens
        return 0, 0


class Cells(Policy):
    """Cells of at most 32 workers, each with its own router: two layers of smg.

    A hash ring assigns a conversation to a cell; `cache_aware` chooses the worker in it.
    """

    SIZE = 32

    def __init__(self, cluster: Cluster, rng: np.random.Generator) -> None:
        super().__init__(cluster, rng)
        count = -(-self.num_workers // self.SIZE)
        bounds = [cell * self.num_workers // count for cell in range(count + 1)]
        self._begins = bounds[:-1]
        self._ring = HashRing(count)
        self._cells = [CacheAware(cluster.part(*pair), rng) for pair in pairwise(bounds)]

    def choose(self, job: Job, now: float) -> int:
        cell = self._ring.worker_of(f"conversation-{job.conversation}")
        return self._begins[cell] + self._cells[cell].choose(job, now)


class LlmD(Policy):
    """llm-d's endpoint picker: maximises 2 * queue + 2 * (1 - KV usage) + 3 * prefix, ties at random.

    `queue` is 1 for the shortest queue and 0 for the longest. `prefix` is the share of the prompt's blocks
    (the first 256, of 16 tokens each) in an index of blocks sent to the worker, with the same number of
    blocks as the worker's cache. Queues and usage are scraped every 50 ms.
    """

    QUEUE, USAGE, PREFIX = 2.0, 2.0, 3.0
    MOST_TOKENS = 256 * 16

    def __init__(self, cluster: Cluster, rng: np.random.Generator) -> None:
        super().__init__(cluster, rng)
        self._has_group: dict[int, np.ndarray] = {}
        self._of_conversation: dict[int, dict[int, int]] = {}  # tokens after the prefix, by worker
        self._sent = [
            PrefixStore(worker.cache_tokens, self._dropper(index))
            for index, worker in enumerate(cluster.workers)
        ]

    def choose(self, job: Job, now: float) -> int:
        scores = self._scores(job, now)
        chosen = int(self.rng.choice(np.flatnonzero(scores == scores.max())))
        own_tokens = max(0, min(job.prompt_tokens, self.MOST_TOKENS) - job.prefix_tokens)
        self._has_group.setdefault(job.group, np.zeros(self.num_workers, bool))[chosen] = True
        self._of_conversation.setdefault(job.conversation, {})[chosen] = own_tokens
        self._sent[chosen].put(job.group, job.prefix_tokens, job.conversation, own_tokens)
        return chosen

    def _scores(self, job: Job, now: float) -> np.ndarray:
        waiting, usage = self.cluster.scraped(now)
        longest, shortest = waiting.max(), waiting.min()
        queue = (longest - waiting) / (longest - shortest) if longest > shortest else 1.0
        scores: np.ndarray = self.QUEUE * queue + self.USAGE * (1 - usage)
        if (has_group := self._has_group.get(job.group)) is not None:
            total = min(job.prompt_tokens, self.MOST_TOKENS)
            scores = scores + has_group * (self.PREFIX * min(job.prefix_tokens, total) / total)
            for worker, tokens in self._of_conversation.get(job.conversation, {}).items():
                scores[worker] += self.PREFIX * tokens / total
        return scores

    def _dropper(self, worker: int) -> Callable[[Key], None]:
        def drop(key: Key) -> None:
            kind, number = key
            if kind == GROUP:
                self._has_group[number][worker] = False
            elif kind == CONVERSATION:
                self._of_conversation[number].pop(worker, None)

        return drop


def _place(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


POLICIES: dict[str, type[Policy]] = {
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "session hash": Session,
    "prefix hash": PrefixHash,
    "cache aware": CacheAware,
    "cells": Cells,
    "llm-d": LlmD,
}
