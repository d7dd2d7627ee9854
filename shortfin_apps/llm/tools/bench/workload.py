"""Workloads: the presets W1 to W5 and custom ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shortfin_apps.llm.contract.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests sent by `concurrency` clients, each of which waits for an answer before its next request.

    `prompt_tokens` has one length per request, without the shared prefix. With `shared_prefix_tokens`, all
    prompts start with the same tokens and there are two passes with the suffixes `c` and `w`: cold, with an
    uncached prefix, and warm, with the same prefix followed by new tokens.
    """

    name: str
    about: str
    prompt_tokens: tuple[int, ...]
    output_tokens: int
    concurrency: int
    shared_prefix_tokens: int = 0

    @property
    def passes(self) -> tuple[str, ...]:
        """The names of the passes, in the order of running."""
        if self.shared_prefix_tokens:
            return (f"{self.name}c", f"{self.name}w")
        return (self.name,)


PRESETS = {
    workload.name: workload
    for workload in (
        Workload(
            name="W1",
            about="one client, 3 requests one after another, 128 in, 128 out",
            prompt_tokens=(128,) * 3,
            output_tokens=128,
            concurrency=1,
        ),
        Workload(
            name="W2",
            about="8 clients at once, 128 in, 128 out",
            prompt_tokens=(128,) * 8,
            output_tokens=128,
            concurrency=8,
        ),
        Workload(
            name="W3",
            about="32 clients at once, 16, 32, ... 512 in, 64 out",
            prompt_tokens=tuple(range(16, 513, 16)),
            output_tokens=64,
            concurrency=32,
        ),
        Workload(
            name="W4",
            about="16 clients at once, 512 shared + 32 own in, 32 out; cold (W4c), then warm (W4w)",
            prompt_tokens=(32,) * 16,
            output_tokens=32,
            concurrency=16,
            shared_prefix_tokens=512,
        ),
        Workload(
            name="W5",
            about="one request, 1,024 in, 1 out",
            prompt_tokens=(1024,),
            output_tokens=1,
            concurrency=1,
        ),
    )
}


def chosen_presets(names: str) -> list[Workload]:
    """Return presets from a list with commas, or `all`. Raises InvalidRequestError for an unknown name."""
    if names.strip().lower() == "all":
        return list(PRESETS.values())
    chosen = [name.strip().upper() for name in names.split(",")]
    for name in chosen:
        if name not in PRESETS:
            raise InvalidRequestError(
                f"there is no preset {name!r}; choose from {', '.join(PRESETS)} or all", "preset"
            )
    return [PRESETS[name] for name in dict.fromkeys(chosen)]


def custom_workloads(
    prompt_tokens: int,
    output_tokens: int,
    concurrencies: Sequence[int],
    requests: int | None,
    shared_prefix_tokens: int = 0,
) -> list[Workload]:
    """One workload per concurrency; by default every client sends two requests."""
    return [
        Workload(
            name=f"C{concurrency}",
            about=f"{concurrency} clients, {prompt_tokens} in, {output_tokens} out",
            prompt_tokens=(prompt_tokens,) * (requests or 2 * concurrency),
            output_tokens=output_tokens,
            concurrency=concurrency,
            shared_prefix_tokens=shared_prefix_tokens,
        )
        for concurrency in concurrencies
    ]
