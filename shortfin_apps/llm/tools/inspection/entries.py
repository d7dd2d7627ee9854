"""The entries of a VMFB: their arguments, and the dispatches of one invocation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shortfin_apps.llm.components.invocation.invoker import result_bytes
from shortfin_apps.llm.components.runtime.bytecode import Calls, read_calls
from shortfin_apps.llm.components.runtime.declaration import format_type
from shortfin_apps.llm.components.runtime.device import EntrySignature
from shortfin_apps.llm.components.runtime.vmfb import read_exports
from shortfin_apps.llm.contract.abi import Entry, argument_names, named_results
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.tools.inspection.kernels import GpuCode, KernelFacts
from shortfin_apps.llm.tools.inspection.subject import Subject

_DISPATCH = "hal.command_buffer.dispatch"

Dispatched = tuple[int | None, int | None]
KernelsByGlobal = Mapping[int, Sequence[KernelFacts]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryFacts:
    """An exported function. `arguments` and `results` are MLIR types by name, None if the VMFB has none.

    `result_bytes`: None if the results are undeclared or their size depends on the batch. `workspace_bytes`:
    temporaries in the server's shared workspace, None if each invocation allocates its own.
    `num_dispatches`: dispatches of one invocation, None if the number is not constant. `launches`: dispatches
    by kernel name, None if unknown.
    """

    name: str
    family: str | None  # None for a function outside of the ABI
    entry_class: str | None  # EntryClass
    rows: int | None  # requests in a batch; None if dynamic
    length: int | None  # tokens of a request, or of a packed batch; None if dynamic
    arguments: dict[str, str] | None
    results: dict[str, str] | None
    result_bytes: int | None
    workspace_bytes: int | None
    num_dispatches: int | None
    launches: dict[str, int] | None


def read_signatures(subject: Subject) -> dict[str, EntrySignature]:
    """Return the declared signatures of the VMFB's functions, by name. Raises ArtifactError."""
    exports = read_exports(subject.vmfb, subject.config.module_name)
    return {name: export.signature for name, export in exports.items()}


def read_entries(subject: Subject, code: GpuCode | None) -> tuple[EntryFacts, ...]:
    """Return the entries of the VMFB, sorted by family, rows and length. Raises ArtifactError."""
    exports = read_exports(subject.vmfb, subject.config.module_name)
    calls = read_calls(subject.vmfb)
    dispatches = {name: None if each is None else dispatched_kernels(each) for name, each in calls.items()}
    kernels = None if code is None else _kernels_by_global(dispatches.values(), code)
    found = [
        _entry(export.signature, dispatches.get(export.function), subject.config, kernels)
        for export in exports.values()
    ]
    return tuple(sorted(found, key=_order))


def _order(entry: EntryFacts) -> tuple[object, ...]:
    return entry.family is None, entry.family or "", entry.rows or 0, entry.length or 0, entry.name


def _entry(
    signature: EntrySignature,
    dispatched: Sequence[Dispatched] | None,
    config: ModelConfig,
    kernels: KernelsByGlobal | None,
) -> EntryFacts:
    parsed = Entry.parse(signature.name)
    return EntryFacts(
        name=signature.name,
        family=parsed.family.value if parsed else None,
        entry_class=parsed.entry_class(is_one_launch=signature.is_one_launch).value if parsed else None,
        rows=parsed.rows if parsed else None,
        length=parsed.length if parsed else None,
        arguments=_arguments(signature, parsed, config),
        results=_results(signature, parsed, config),
        result_bytes=result_bytes(signature),
        workspace_bytes=signature.workspace_bytes,
        num_dispatches=None if dispatched is None else len(dispatched),
        launches=None if dispatched is None or kernels is None else _launches(dispatched, kernels),
    )


def _arguments(signature: EntrySignature, entry: Entry | None, config: ModelConfig) -> dict[str, str] | None:
    types = signature.arguments
    if types is None:
        return None
    names: tuple[str, ...] = ()
    if entry is not None:
        layout = entry.layout(signature.tokens_rank)
        names = argument_names(
            layout,
            has_prefill_position=config.has_prefill_position,
            has_windows=config.has_window_table,
            takes_followers=signature.takes_followers,
            takes_hidden=signature.takes_hidden,
        )
        if entry.takes_slabs:
            has_one = len(config.slabs) == 1
            names += ("cache",) if has_one else tuple(f"cache_{s.pool}_{s.stage}" for s in config.slabs)
    return {
        names[index] if index < len(names) else f"argument_{index}": format_type(each)
        for index, each in enumerate(types)
    }


def _results(signature: EntrySignature, entry: Entry | None, config: ModelConfig) -> dict[str, str] | None:
    if signature.results is None:
        return None
    name_results = named_results if entry is None else entry.named_results
    return {name: format_type(each) for name, each in name_results(signature.results, config.top_k).items()}


def dispatched_kernels(calls: Calls) -> tuple[Dispatched, ...]:
    """Return two numbers for each dispatch: the executable's VM global, and the kernel in this executable.

    Either is None if it is not a constant. Direct and indirect dispatches (workgroup counts as scalars or in
    a buffer) have the same first arguments: command buffer, executable, kernel number.
    """
    dispatches = (call for call in calls if call.function.startswith(_DISPATCH))
    return tuple((call.global_numbers[1], call.arguments[2]) for call in dispatches)


def _kernels_by_global(
    dispatches: Iterable[Sequence[Dispatched] | None], code: GpuCode
) -> KernelsByGlobal | None:
    """Map each executable's global to the kernels of its code object; None if a global is unknown.

    Globals and code objects are in the same order.
    """
    found = {number for each in dispatches if each is not None for number, _ in each if number is not None}
    if len(found) != len(code.code_objects):
        return None
    return dict(zip(sorted(found), code.code_objects, strict=True))


def _launches(dispatched: Sequence[Dispatched], kernels: KernelsByGlobal) -> dict[str, int] | None:
    """Return the number of launches by kernel name, or None if a dispatch's kernel is not a constant."""
    names = []
    for executable, number in dispatched:
        own = () if executable is None else kernels[executable]
        if number is None or number >= len(own):
            return None
        names.append(own[number].name)
    return dict(Counter(names))
