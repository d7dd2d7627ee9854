"""Runs a workload on workers with a router, event by event."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from bench.simulate_cluster.policies import POLICIES, Cluster, Policy
from bench.simulate_cluster.worker import INFINITE, Job, StepTimes, Worker
from bench.simulate_cluster.workload import Floats, Workload


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """`cache_tokens`: 105 of an H200's 141 GB, with K and V of 128 KiB per token, as in Llama 3.1 8B."""

    cache_tokens: int = 800_000
    max_running: int = 256
    times: StepTimes = field(default_factory=StepTimes)


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of the requests that arrived after the warm-up; TTFT in seconds."""

    ttft_s: Floats
    prompt_tokens: int
    hit_tokens: int
    busiest: float  # requests of the busiest worker relative to the average

    @property
    def hit_rate(self) -> float:
        """The share of all prompt tokens found in a cache."""
        return self.hit_tokens / max(1, self.prompt_tokens)


class Simulation:
    def __init__(
        self, workload: Workload, policy: str, num_workers: int, options: WorkerOptions, seed: int = 0
    ) -> None:
        decode_s, mixed_s = options.times.tables(options.max_running)
        self._workers = [
            Worker(decode_s, mixed_s, options.times.budget_tokens, options.max_running, options.cache_tokens)
            for _ in range(num_workers)
        ]
        self._workload = workload
        self._cluster = Cluster(self._workers)
        self._policy: Policy = POLICIES[policy](self._cluster, np.random.default_rng(seed))
        self._events: list[tuple[float, int, int]] = []  # time, worker or -1 - turn, version or conversation
        self._versions = [0] * num_workers
        self._context = np.zeros(len(workload.group), np.int64)  # tokens so far, by conversation
        self.jobs: list[Job] = []
        self.end_s = 0.0  # end of the last request

    def run(self, warm_up_s: float, end_s: float) -> Result:
        """Run until all requests that arrive before `end_s` have ended."""
        for conversation, start_s in enumerate(self._workload.starts_s.tolist()):
            turn = int(self._workload.first_turn[conversation])
            self._events.append((start_s, -1 - turn, conversation))
        heapq.heapify(self._events)
        while self._events:
            now, index, version = heapq.heappop(self._events)
            if index < 0:
                if now < end_s:
                    self._arrive(now, -1 - index, version)
            elif version == self._versions[index]:
                self._finish(now, index)
        return self._result(warm_up_s)

    def check_integrity(self) -> None:
        """Raise AssertionError if a run left requests or pins."""
        assert not self._cluster.in_flight.any()
        for worker in self._workers:
            assert not worker.waiting
            assert not worker.cache.pinned_tokens
            assert worker.next_event() == INFINITE

    def _arrive(self, now: float, turn: int, conversation: int) -> None:
        load = self._workload
        asked = int(self._context[conversation]) + int(load.question_tokens[turn])
        answer = int(load.answer_tokens[turn])
        self._context[conversation] = asked + answer
        prefix = load.prefix_tokens
        group = int(load.group[conversation])
        job = Job(turn, conversation, group, prefix, prefix + asked, answer, now)
        job.worker = self._policy.choose(job, now)
        self._cluster.in_flight[job.worker] += 1
        self._cluster.processed[job.worker] += 1
        self._workers[job.worker].add(job, now)
        self._schedule(job.worker)
        self.jobs.append(job)

    def _finish(self, now: float, index: int) -> None:
        _, ended = self._workers[index].finish(now)
        self._schedule(index)
        if ended is None:
            return
        self.end_s = now
        self._cluster.in_flight[index] -= 1
        following = ended.turn + 1
        if following < self._workload.first_turn[ended.conversation + 1]:
            due = now + float(self._workload.think_s[ended.turn])
            heapq.heappush(self._events, (due, -1 - following, ended.conversation))

    def _schedule(self, index: int) -> None:
        self._versions[index] += 1
        due = self._workers[index].next_event()
        if due < INFINITE:
            heapq.heappush(self._events, (due, index, self._versions[index]))

    def _result(self, warm_up_s: float) -> Result:
        measured = [job for job in self.jobs if job.arrival_s >= warm_up_s]
        counts = np.bincount([job.worker for job in measured], minlength=len(self._workers))
        return Result(
            ttft_s=np.array([job.first_token_s - job.arrival_s for job in measured]),
            prompt_tokens=sum(job.prompt_tokens for job in measured),
            hit_tokens=sum(job.hit_tokens for job in measured),
            busiest=float(counts.max() / max(1e-9, counts.mean())),
        )
