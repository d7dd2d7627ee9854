"""The trace spans of one sequence: queueing, prefill chunks, decode and detokenisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from shortfin_apps.llm.components.request.messages import ComputedTask, FinishReason
from shortfin_apps.llm.serving.frontend.metrics import RequestTimer
from shortfin_apps.llm.serving.frontend.text_stream import PendingAnswer


class SequenceSpans:
    """Records spans under `parent`. `epoch_s` is the timers' zero, in seconds since the epoch."""

    def __init__(self, tracer: Tracer, parent: Context, epoch_s: float) -> None:
        self._tracer = tracer
        self._parent = parent
        self._epoch_s = epoch_s

    def record(self, answer: PendingAnswer, now_s: float) -> None:
        """Record all spans of a sequence that has ended, or ends now."""
        timer = answer.timer
        ended_s = now_s if timer.ended_s is None else timer.ended_s
        num_prompt = len(answer.request.prompt_token_ids)
        attributes: dict[str, AttributeValue] = {
            "shortfin_llm.choice": answer.request.choice,
            "gen_ai.usage.input_tokens": num_prompt,
            "gen_ai.usage.cache_read.input_tokens": timer.cached_tokens,
            "gen_ai.usage.output_tokens": timer.num_tokens,
        }
        if timer.finish_reason is not None:
            attributes["gen_ai.response.finish_reasons"] = [timer.finish_reason.value]
        sequence = self._start("generate", timer.arrival_s, attributes)
        if timer.finish_reason is FinishReason.ERROR:
            sequence.set_status(Status(StatusCode.ERROR))
        below = SequenceSpans(self._tracer, set_span_in_context(sequence, Context()), self._epoch_s)
        below._record_parts(timer, num_prompt, ended_s)
        sequence.end(self._ns(ended_s))

    def _record_parts(self, timer: RequestTimer, num_prompt: int, ended_s: float) -> None:
        computed = timer.computed or []
        if computed or timer.first_s is None:  # false for a beam search: its steps record no tasks
            self._span("queue", timer.arrival_s, computed[0].began_s if computed else ended_s)
        first, later = _split(computed, num_prompt)
        again = [task for task in later if _is_prefill(task, num_prompt)]
        for task in first:
            self._prefill(task, is_again=False)
        for task in again:
            self._prefill(task, is_again=True)
        if timer.first_s is None:
            return
        if timer.num_tokens > 1:
            self._decode(timer, first, later, again, num_prompt)
        busy = {"shortfin_llm.detokenize.seconds": timer.detokenise_s}
        self._span("detokenize", timer.first_s, ended_s, busy)

    def _prefill(self, task: ComputedTask, *, is_again: bool) -> None:
        attributes: dict[str, AttributeValue] = {
            "shortfin_llm.start_position": task.start_position,
            "shortfin_llm.tokens": task.num_tokens,
            "shortfin_llm.entry_family": task.entry_family,
            "shortfin_llm.batch_tasks": task.batch_tasks,
            "shortfin_llm.device.seconds": task.device_after_s - task.device_before_s,
            "shortfin_llm.after_preemption": is_again,
        }
        self._span("prefill", task.began_s, task.ended_s, attributes)

    def _decode(
        self,
        timer: RequestTimer,
        first: Sequence[ComputedTask],
        later: Sequence[ComputedTask],
        again: Sequence[ComputedTask],
        num_prompt: int,
    ) -> None:
        """Record one span from the first to the last token, using the engine's times where available."""
        assert timer.first_s is not None
        began_s = first[-1].ended_s if first else timer.first_s
        last = later[-1] if later else None
        attributes: dict[str, AttributeValue] = {"shortfin_llm.tokens": timer.num_tokens - 1}
        ended_s = timer.last_s
        if last is not None and last.start_position + 1 == num_prompt + timer.num_tokens - 1:
            ended_s = last.ended_s
            attributes["shortfin_llm.device.seconds"] = last.device_after_s - later[0].device_before_s
        if later:
            attributes["shortfin_llm.entry_family"] = sorted({task.entry_family for task in later})
            attributes["shortfin_llm.batch_tasks"] = max(task.batch_tasks for task in later)
        span = self._start("decode", began_s, attributes)
        span.add_event("first token", timestamp=self._ns(began_s))
        for task in again:
            if task.start_position == min(each.start_position for each in again):
                span.add_event("computed again after a preemption", timestamp=self._ns(task.began_s))
        span.end(self._ns(max(began_s, ended_s)))

    def _span(
        self,
        name: str,
        began_s: float,
        ended_s: float,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> None:
        span = self._start(name, began_s, attributes or {})
        span.end(self._ns(max(began_s, ended_s)))

    def _start(self, name: str, began_s: float, attributes: Mapping[str, AttributeValue]) -> Span:
        return self._tracer.start_span(
            name, self._parent, attributes=attributes, start_time=self._ns(began_s)
        )

    def _ns(self, seconds: float) -> int:
        return int((self._epoch_s + seconds) * 1e9)


def _split(
    computed: Sequence[ComputedTask], num_prompt: int
) -> tuple[Sequence[ComputedTask], Sequence[ComputedTask]]:
    """Split the tasks after the one that produced the first token."""
    for index, task in enumerate(computed, 1):
        if task.start_position + task.num_tokens >= num_prompt:
            return computed[:index], computed[index:]
    return computed, ()


def _is_prefill(task: ComputedTask, num_prompt: int) -> bool:
    return task.num_tokens > 1 or task.start_position < num_prompt
