"""`Block`: the interface of a layer's blocks, such as attention, a gated delta net or a feed-forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, ClassVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from shortfin_apps.llm.model.kv_layout import KVLayout
from shortfin_apps.llm.model.operations import ModelTensor, Operation
from shortfin_apps.llm.model.reference.pointwise import F32, rms_norm
from shortfin_apps.llm.model.rope import Rotation


@dataclass(frozen=True, slots=True)
class Block(ABC):
    """A part of a layer that adds its output to the residual stream [tokens, hidden] f32.

    Each subclass is a frozen dataclass in a module of this folder. The module also has the operations that
    only this kind of block uses.
    """

    KIND: ClassVar[str]  # the name of the kind in the plural, for error messages

    def __init_subclass__(cls) -> None:
        _KINDS[cls.__name__] = cls

    @abstractmethod
    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        """List the tensors and the weights they are stacked into, with names without `blk.N.`."""

    @abstractmethod
    def operations(self, layer: int, x: str, out: str) -> Iterator[Operation]:
        """List the operations that read the residual stream `x` and write the new one to `out`."""

    @abstractmethod
    def compute(self, x: F32, layer: ReferenceLayer) -> F32:
        """Compute in numpy the block's addition to the residual stream `x` of one sequence."""

    @property
    @abstractmethod
    def vector_sizes(self) -> dict[str, int]:
        """Name in errors -> size that must be a multiple of the CPU kernels' vector length."""

    @property
    def kv_layout(self) -> KVLayout | None:
        """The data stored per token or page, and its pool; None if the block stores nothing."""
        return None

    @property
    def rotation(self) -> Rotation | None:
        """The rotation (cosines and sines) that the block needs; None if it needs none."""
        return None

    @property
    def attended_features(self) -> int:
        """Query features per token, to count the arithmetic of attention; 0 for other blocks."""
        return 0

    def within(self, context: int) -> Block:
        """Return the block for sequences of at most `context` tokens, by default unchanged."""
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema, by which files have a block's fields plus `block`, the name of its class."""
        if cls is not Block:
            return handler(source)
        for module in iter_modules([str(Path(__file__).parent)]):
            if not module.ispkg:
                import_module(f"{__package__}.{module.name}")
        return core_schema.tagged_union_schema(
            {name: handler.generate_schema(kind) for name, kind in _KINDS.items()},
            discriminator="block",
            serialization=core_schema.plain_serializer_function_ser_schema(_named),
        )


_KINDS: dict[str, type[Block]] = {}


def _named(block: Block) -> dict[str, Any]:
    return {"block": type(block).__name__, **{each.name: getattr(block, each.name) for each in fields(block)}}


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """The new K (after rotation) and V of a layer, each [tokens, kv_heads, head_dim], as cached."""

    keys: F32
    values: F32


@dataclass(slots=True)
class Carried:
    """Values that layers pass to later layers, in addition to the residual stream.

    `layer_inputs` [tokens, layers, features]: see layer_inputs.py; `keys_values`: of layers that keep them, K
    and V of the preceding positions [2, positions, kv_heads, head_dim], K and V of the new tokens.
    """

    layer_inputs: F32 | None = None
    keys_values: dict[int, tuple[F32, F32, F32]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ReferenceLayer:
    """A layer's inputs to `Block.compute`, the numpy reference.

    `number`: the layer's; `weights`: by names without `blk.N.`; `past` [2, positions, kv_heads, head_dim]: K
    and V of the preceding positions, or None for a sequence that starts at position 0. A block that stores
    keys and values sets `cached`; for a quantised cache, these values are rounded to 8 bits.
    """

    weights: Mapping[str, F32]
    rms_norm_eps: float
    max_position_embeddings: int
    number: int = 0
    carried: Carried = field(default_factory=Carried)
    past: F32 | None = None
    has_quantised_cache: bool = False
    cached: CachedTokens | None = None

    def normed(self, x: F32, weight: str) -> F32:
        """Return the RMS norm of `x` with the named weight; `x` itself if the layer has no such weight."""
        found = self.weights.get(weight)
        return x if found is None else rms_norm(self.rms_norm_eps, x, found)
