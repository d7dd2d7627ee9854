"""A process that renders chat templates, each in a worker that is killed at its limits.

    python -m shortfin_apps.llm.serving.text.template_process FD LIMITS

A model's template is untrusted, and jinja2 cannot be interrupted. Therefore this process imports jinja2 once
and forks workers; see `limited_process.py`. A worker's first work item is the source of a template, which the
worker compiles. Each further item is either null or a rendering: `[messages, add_generation_prompt,
variables]`. The result is `[text, error]`, of which one is null; the text is empty for a source and for null.
"""

from __future__ import annotations

import json
import sys

from shortfin_apps.llm.contract.errors import ArtifactError, InvalidRequestError
from shortfin_apps.llm.limited_process import Limits, serve
from shortfin_apps.llm.serving.text.chat_template import ChatTemplate

NOTHING = b"null\n"  # a work item without a rendering
TEMPLATE_LIMITS = Limits(cpu_s=1.0, wall_s=10.0)  # a rendering typically takes 1 ms


def main() -> None:
    control_fd, limits = map(json.loads, sys.argv[1:])
    serve(control_fd, Limits(*limits), _Worker)


class _Worker:
    """A worker with one template."""

    def __init__(self) -> None:
        self._template: ChatTemplate | None = None

    def __call__(self, line: bytes) -> tuple[str | None, str | None]:
        try:
            return self._result(json.loads(line)), None
        except (ArtifactError, InvalidRequestError) as error:
            return None, str(error)

    def _result(self, work: str | tuple[list[dict[str, object]], bool, dict[str, object]] | None) -> str:
        if self._template is None:
            assert isinstance(work, str), "a template comes first"
            self._template = ChatTemplate(work)
            return ""
        if work is None:
            return ""
        assert not isinstance(work, str)
        messages, add_generation_prompt, variables = work
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )


if __name__ == "__main__":
    main()
