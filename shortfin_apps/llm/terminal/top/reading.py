"""A snapshot of a server's `/metrics`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from shortfin_apps.llm.client import ServerError

Labels = Mapping[str, str]
LARGEST = 2.0**64


@dataclass(frozen=True, slots=True)
class Reading:
    """All samples by name, read at `at_s` (seconds of a monotonic clock)."""

    at_s: float
    samples: Mapping[str, list[tuple[Labels, float]]]

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples with these labels; None if there are none."""
        values = [
            value
            for found, value in self.samples.get(name, ())
            if all(found.get(label) == wanted for label, wanted in labels.items())
        ]
        return sum(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the samples' sums, grouped by the value of a label."""
        sums: dict[str, float] = {}
        for found, value in self.samples.get(name, ()):
            if label in found:
                sums[found[label]] = sums.get(found[label], 0.0) + value
        return sums

    def buckets(self, name: str) -> dict[float, float]:
        """Return a histogram's cumulative counts by upper bound; the last bound is infinite."""
        return {float(bound): count for bound, count in self.by_label(f"{name}_bucket", "le").items()}


def parsed(text: str, at_s: float) -> Reading:
    """Parse Prometheus's text format. Raises ServerError for any other text.

    A metric with a sample that is not a usable number is omitted: summaries of other servers are NaN before
    their first observation.
    """
    samples: dict[str, list[tuple[Labels, float]]] = {}
    unusable: set[str] = set()
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
                if not _is_figure(sample.value, sample.labels):
                    unusable.add(sample.name)
    except (ValueError, LookupError) as error:
        raise ServerError("the server's /metrics are not in Prometheus's text format") from error
    return Reading(at_s, {name: found for name, found in samples.items() if name not in unusable})


def _is_figure(value: float, labels: Labels) -> bool:
    """Whether the value is finite and not too large, and a bucket's bound is a number."""
    try:
        return abs(value) <= LARGEST and float(labels.get("le", 0)) > -math.inf
    except ValueError:
        return False
