"""Choose a kernel class for each kind of operation, by target, dtypes and shapes, with reasons.

To add kernels, write a class with the methods that lowering.py lists, and add a Candidate for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Emitter
from shortfin_apps.llm.builder.graph.rotary import emit_unrotated
from shortfin_apps.llm.builder.graph.token_layout import lay_out
from shortfin_apps.llm.builder.kernels.triton import GROUP
from shortfin_apps.llm.builder.lowering.amx.experts import AmxExperts
from shortfin_apps.llm.builder.lowering.avx512.attention import Bf16Attention, fills_attention_tiles
from shortfin_apps.llm.builder.lowering.cpu.attention import VectorAttention
from shortfin_apps.llm.builder.lowering.cpu.delta_net import VectorDeltaNet
from shortfin_apps.llm.builder.lowering.cpu.experts import VectorExperts
from shortfin_apps.llm.builder.lowering.cpu.int8 import Int8Operations
from shortfin_apps.llm.builder.lowering.cpu.latent_attention import CpuLatentAttention
from shortfin_apps.llm.builder.lowering.cpu.matmul import VectorOperations
from shortfin_apps.llm.builder.lowering.cpu.sampling import VectorSampling
from shortfin_apps.llm.builder.lowering.cpu.top_k import VectorTopK
from shortfin_apps.llm.builder.lowering.fused.layers import FusedLayers
from shortfin_apps.llm.builder.lowering.fused.stage_kernels import StageKernels
from shortfin_apps.llm.builder.lowering.linalg.experts import LinalgExperts
from shortfin_apps.llm.builder.lowering.linalg.operations import LinalgOperations
from shortfin_apps.llm.builder.lowering.linalg.table import LOWERINGS
from shortfin_apps.llm.builder.lowering.lowering import Lowering, LoweringContext, Prepare
from shortfin_apps.llm.builder.weights.chosen_layout import (
    experts_fill_tiles,
    fills_panels,
    fills_tiles,
    linear_sizes,
    multiplies_blocks,
)
from shortfin_apps.llm.builder.weights.layout import LANES, PANEL
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.attention import Attend, NormWhole
from shortfin_apps.llm.model.block import Block
from shortfin_apps.llm.model.delta_net import DeltaRule
from shortfin_apps.llm.model.feed_forward import GatedExperts, Route, SumExperts
from shortfin_apps.llm.model.latent_attention import AbsorbKeys, AttendLatent, ExpandValues
from shortfin_apps.llm.model.operations import (
    AddNormed,
    Embed,
    GatedLinear,
    LastTokens,
    Linear,
    Norm,
    Operation,
    Sample,
    TopK,
)
from shortfin_apps.llm.model.weight_blocks import BLOCK

Kind = type[Operation]
MOST_CANDIDATES = 256  # maximum k of the Triton top-k, which keeps its candidates in registers
MOST_STATE_ELEMENTS = 1 << 16  # maximum size of a head's state, which a workgroup keeps in registers
EXPERTS: tuple[Kind, ...] = (Route, GatedExperts, SumExperts)
ON_EVERY_TARGET: tuple[Kind, ...] = (Embed, Norm, AddNormed, Attend, LastTokens, TopK, Sample)
BETWEEN_ATTENTIONS: tuple[Kind, ...] = (Norm, Linear, GatedLinear)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel class for some kinds of operations.

    `needs` returns description -> whether met, for each requirement; `make` creates the kernel class.
    """

    name: str
    kinds: Collection[Kind]
    needs: Callable[[LoweringContext], dict[str, bool]]
    make: Callable[[LoweringContext], Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel class chosen for one kind of operation.

    `reason`: the requirements that are met, and for each earlier candidate one that is not.
    """

    kind: Kind
    candidate: Candidate
    reason: str

    def __str__(self) -> str:
        return f"{self.kind.__name__}: {self.candidate.name}{self.reason}"


def _always(_: LoweringContext) -> dict[str, bool]:
    return {}


def _cpu(c: LoweringContext) -> dict[str, bool]:
    return {"a CPU": c.target.is_cpu}


def _int8(c: LoweringContext) -> dict[str, bool]:
    return _cpu(c) | {"weights in int8": c.options.weights == "int8"}


def _fused(c: LoweringContext) -> dict[str, bool]:
    in_blocks = c.options.weights in ("q8_0", "q4")
    return {
        "a CPU of x86-64 or aarch64": c.target.is_cpu and c.target.architecture in ("x86_64", "arm_64"),
        "weights in floats, or that it multiplies as integers": not in_blocks or c.target.multiplies_blocks,
        **{f"no {block.KIND}": False for block in _blocks_with_own_matmuls(c)},
        f"sizes in multiples of {PANEL}": fills_panels(c.spec),
    }


def _blocks_with_own_matmuls(c: LoweringContext) -> list[Block]:
    return [block for block in c.spec.blocks if linear_sizes(block, c.spec.hidden_size) is None]


def _bf16_attention(c: LoweringContext) -> dict[str, bool]:
    return {
        "AVX-512 with bf16": c.target.has_bf16_dot,
        "activations in bf16": c.options.activations == "bf16",
        "a KV cache in bf16 or q8_0": c.options.kv in ("bf16", "q8_0"),
        "heads and pages of whole tiles": fills_attention_tiles(c.spec, c.options),
    }


def _row_major(c: LoweringContext) -> dict[str, bool]:
    in_floats = c.options.weights == c.options.activations
    return {"row-major weights in floats": not c.target.is_cpu and in_floats}


def _gpu(c: LoweringContext) -> dict[str, bool]:
    return {"a GPU": c.target.architecture in ("amdgpu", "nvptx")}


def _triton(c: LoweringContext) -> dict[str, bool]:
    return {
        **_gpu(c),
        f"hidden_size in multiples of {GROUP}": c.spec.hidden_size % GROUP == 0,
        "matrices of fewer than 2^31 elements": max(map(prod, c.weights.shapes)) < 1 << 31,
        f"input features in multiples of {BLOCK}, or weights in floats": not _cuts_blocks(c),
    }


def _cuts_blocks(c: LoweringContext) -> bool:
    """Whether weights are to be stored in blocks, and a row does not consist of whole blocks."""
    columns = [shape[-1] for shape in c.weights.shapes if len(shape) > 1]
    return c.options.weights in ("q8_0", "q4") and any(each % BLOCK for each in columns)


def _triton_candidates(c: LoweringContext) -> dict[str, bool]:
    return {
        **_gpu(c),
        f"at most {MOST_CANDIDATES} candidates": c.options.top_k <= MOST_CANDIDATES,
    }


def _triton_states(c: LoweringContext) -> dict[str, bool]:
    net = c.spec.delta_net
    fits = net is not None and net.block_elements <= MOST_STATE_ELEMENTS
    return {**_gpu(c), f"states of at most {MOST_STATE_ELEMENTS} elements a head": fits}


def _from_triton(module: str, name: str) -> Callable[[LoweringContext], Any]:
    """Return a function that creates the kernel class `name` of lowering/triton/`module`.

    The module is imported only then, as it needs Triton. Raises BuildError if Triton is not installed.
    """

    def make(c: LoweringContext) -> Any:
        if find_spec("triton") is None:
            raise BuildError(
                f"{c.target.device} needs Triton to build, not to serve: "
                "run `pip install 'shortfin-llm[gpu-build]'`"
            )
        return getattr(import_module(f"shortfin_apps.llm.builder.lowering.triton.{module}"), name)(c)

    return make


def _amx_expert_tiles(c: LoweringContext) -> dict[str, bool]:
    need = f"AMX, and experts in bf16 or f16 of sizes in multiples of {PANEL}"
    return {need: experts_fill_tiles(c.spec, c.options, c.target)}


def _fused_layers(c: LoweringContext) -> FusedLayers:
    options = c.options
    kernels = StageKernels(c.spec, c.weights, options.activations, options.block_bits, c.target)
    return FusedLayers(c.weights, c.render, c.spec.all_operations(), kernels)


FUSED_LAYER = Candidate("fused/layer", BETWEEN_ATTENTIONS, _fused, _fused_layers)
BF16_ATTENTION = Candidate("avx512/paged_attention", (Attend,), _bf16_attention, Bf16Attention)

TRITON = Candidate(
    "triton/layers",
    (Embed, Norm, AddNormed, Linear, GatedLinear, *EXPERTS, NormWhole, Attend, LastTokens),
    _triton,
    _from_triton("layers", "TritonLayers"),
)

TRITON_LATENT = Candidate(
    "triton/latent_attention",
    (AbsorbKeys, AttendLatent, ExpandValues),
    _triton,
    _from_triton("latent_attention", "TritonLatentAttention"),
)

# In order of preference: for each kind of operation, the first candidate with all needs met is chosen.
CANDIDATES = (
    FUSED_LAYER,
    BF16_ATTENTION,
    Candidate("cpu/matmul_int8", BETWEEN_ATTENTIONS, _int8, Int8Operations),
    Candidate("cpu/rms_norm", (Norm,), _cpu, VectorOperations),
    Candidate("cpu/matmul", (Linear, GatedLinear), _cpu, VectorOperations),
    Candidate("amx/experts", EXPERTS, _amx_expert_tiles, AmxExperts),
    Candidate("cpu/experts", EXPERTS, _cpu, VectorExperts),
    Candidate("cpu/paged_attention", (Attend,), _cpu, VectorAttention),
    Candidate(
        "avx512/latent_attention",
        (AttendLatent,),
        _bf16_attention,
        lambda c: CpuLatentAttention(c, Bf16Attention),
    ),
    Candidate(
        "cpu/latent_attention", (AttendLatent,), _cpu, lambda c: CpuLatentAttention(c, VectorAttention)
    ),
    Candidate("cpu/delta_net", (DeltaRule,), _cpu, VectorDeltaNet),
    Candidate("cpu/top_k", (TopK,), _cpu, VectorTopK),
    Candidate("cpu/sampling", (Sample,), _cpu, VectorSampling),
    TRITON,
    TRITON_LATENT,
    Candidate("triton/delta_net", (DeltaRule,), _triton_states, _from_triton("delta_net", "TritonDeltaNet")),
    Candidate("triton/top_k", (TopK,), _triton_candidates, _from_triton("top_k", "TritonTopK")),
    Candidate("triton/sampling", (Sample,), _triton_candidates, _from_triton("sampling", "TritonSampling")),
    Candidate("linalg", (Linear, GatedLinear), _row_major, LinalgOperations),
    Candidate("linalg/experts", EXPERTS, _row_major, LinalgExperts),
    Candidate(
        "linalg", (Embed, Norm, AddNormed, Attend, LastTokens, TopK, Sample), _always, LinalgOperations
    ),
    Candidate("linalg", LOWERINGS.keys(), _always, LinalgOperations),
)


def choose(context: LoweringContext, candidates: Sequence[Candidate] = CANDIDATES) -> tuple[Choice, ...]:
    """Choose a candidate for each kind of operation in the model, and for TopK and Sample.

    Raises BuildError if no candidate fits, or if the target does not support the weights' type or size.
    """
    _check_sizes(context)
    kinds = dict.fromkeys(map(type, context.spec.all_operations()))
    choices = {kind: _choose(kind, context, candidates) for kind in (*kinds, TopK, Sample)}
    attend = choices.get(Attend)
    if attend and choices[Linear].candidate is FUSED_LAYER and context.target.is_cpu:
        reason = f"{attend.reason}; a decode's is a stage of {FUSED_LAYER.name}"
        choices[Attend] = replace(attend, reason=reason)
    return tuple(choices.values())


def make_lowering(context: LoweringContext, choices: Sequence[Choice]) -> Lowering:
    """Create the Lowering with the chosen kernel classes, one object per candidate."""
    made: dict[str, Any] = {}
    for choice in choices:
        if choice.candidate.name not in made:
            made[choice.candidate.name] = choice.candidate.make(context)
    kernels = {choice.kind: made[choice.candidate.name] for choice in choices}
    fused = made.get(FUSED_LAYER.name) or made.get(TRITON.name)
    attention = kernels.get(Attend)
    if isinstance(fused, FusedLayers) and isinstance(attention, Bf16Attention | VectorAttention):
        fused.attention = attention
    return Lowering(kernels, context.rendered, fused, _preparation(context, made))


def _preparation(context: LoweringContext, made: Mapping[str, Any]) -> Prepare:
    prepare = _token_preparation(context, made)
    unrotated = [each for each in context.spec.rotations if each.rope is None]
    if not unrotated:
        return prepare

    def prepare_both(e: Emitter, batch: Batch) -> None:
        prepare(e, batch)
        batch.rotaries |= {each: emit_unrotated(e, each, batch.tokens) for each in unrotated}

    return prepare_both


def _token_preparation(context: LoweringContext, made: Mapping[str, Any]) -> Prepare:
    if TRITON.name in made:
        prepare: Prepare = made[TRITON.name].prepare
        return prepare
    rotaries = context.rotaries
    return lambda e, batch: lay_out(e, batch, rotaries)


def has_static_workspace(choices: Sequence[Choice]) -> bool:
    """Whether the size of temporary memory depends only on the numbers of sequences and tokens."""
    return any(
        choice.kind in (Attend, AttendLatent) and choice.candidate in (TRITON, TRITON_LATENT)
        for choice in choices
    )


def _choose(kind: Kind, context: LoweringContext, candidates: Sequence[Candidate]) -> Choice:
    passed_over: list[str] = []
    for candidate in candidates:
        if kind not in candidate.kinds:
            continue
        needs = candidate.needs(context)
        missing = [need for need, is_met in needs.items() if not is_met]
        if not missing:
            given = f", given {', '.join(needs)}" if needs else ""
            return Choice(kind, candidate, "".join([given, *passed_over]))
        passed_over.append(f"; not {candidate.name}, which needs {missing[0]}")
    reasons = "".join(passed_over).removeprefix("; ") or "it is not in LOWERINGS (lowering/linalg/table.py)"
    raise BuildError(f"nothing computes {kind.__name__} on {context.target.device}: {reasons}")


def _check_sizes(c: LoweringContext) -> None:
    """Raise BuildError for weight types or sizes that the target's kernels do not support."""
    weights, target, hidden = c.options.weights, c.target, c.spec.hidden_size
    if c.options.activation_bits and not (c.options.has_blocks and multiplies_blocks(c.spec, target)):
        raise BuildError(
            f"--activation-bits does not apply to {c.options.stored_weights} of this model on "
            f"{target.device}: leave it out. It is for weights in blocks (q8_0, q4, a GGUF file's own types) "
            "that a CPU multiplies as integers, in models with sizes in multiples of 32, without routed "
            "experts or gated delta nets"
        )
    if c.options.activation_bits == 16 and not fills_tiles(c.spec, c.options.activations, target):
        raise BuildError(
            f"--activation-bits 16 multiplies in tiles of AMX, which {target.device} lacks: leave it out"
        )
    if not target.is_cpu:
        if weights == "int8":
            raise BuildError(f"weights in int8 are for CPUs; use q8_0 or bf16 for {target.device}")
        if weights == "fp8" and target.fp8 is None:
            raise BuildError(f"{target.cpu} does not multiply 8-bit floats; use q8_0 or bf16 there")
        return
    if weights == "int8" and (others := _blocks_with_own_matmuls(c)):
        raise BuildError(f"weights in int8 are not for models with {others[0].KIND}; use q8_0")
    sizes = [
        ("hidden_size", hidden),
        *(each for block in c.spec.blocks for each in block.vector_sizes.items()),
    ]
    for name, size in sizes:
        if size % LANES:
            raise BuildError(f"{name} {size} is not a multiple of {LANES}, as CPU kernels need")
    if weights == "fp8":
        raise BuildError("weights in fp8 are for GPUs; use q8_0 on a CPU")
    if weights == "int8" and not target.multiplies_blocks:
        raise BuildError(f"int8 needs a CPU with AVX2 or SDOT, which {target.cpu} is not; use q8_0 there")
    if weights == "int8" and hidden % PANEL:
        raise BuildError(f"int8 needs a hidden_size in multiples of {PANEL}, not {hidden}; use q8_0")
