"""The interface of a batching mode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from shortfin_apps.llm.components.batching.batch import Batch, LlmTaskInput
from shortfin_apps.llm.components.request.request import Request


class BatchMode(ABC):
    """A policy: how a request is cut into tasks, and which tasks go into the next invocation.

    It owns no request and no page. A mode is one file in `modes/` and one line in the registry.
    """

    @abstractmethod
    def make_task_inputs(self, request: Request) -> list[LlmTaskInput]:
        """All tasks that are left of what `request` knows, in the order they must run."""

    @abstractmethod
    def next_batch(self, running: Sequence[Request]) -> Batch | None:
        """The next invocation, or None when `running` holds nothing to do.

        `running` is ordered by admission; every request in it has at least one token to compute and
        pages for all it knows. No task may depend on another one of the same batch.
        """
