"""What the code asks a block of a layer, whether an attention, a state, a feed-forward or another kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
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
    """A part of a layer that adds to the residual stream [tokens, hidden] f32.

    A kind of block is a frozen dataclass in a module of this folder, next to the operations that only it has.
    """

    KIND: ClassVar[str]  # in the plural, for errors

    def __init_subclass__(cls) -> None:
        _KINDS[cls.__name__] = cls

    @abstractmethod
    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        """List the tensors, and the weights that they are stacked into, by their names in the layer."""

    @abstractmethod
    def operations(self, layer: int, x: str, out: str) -> Iterator[Operation]:
        """List the operations from the residual stream `x` to `out`."""

    @abstractmethod
    def compute(self, x: F32, layer: ReferenceLayer) -> F32:
        """Compute in numpy what the block adds to the residual stream `x` of one sequence."""

    @property
    def kv_layout(self) -> KVLayout | None:
        """What a token stores, and in which pool of pages."""
        return None

    @property
    def rotation(self) -> Rotation | None:
        """The rotation that the batch needs for the block."""
        return None

    @property
    def attended_features(self) -> int:
        """The features of a token that are multiplied by each visible token's keys, and by its values."""
        return 0

    @property
    def vector_sizes(self) -> dict[str, int]:
        """The sizes that CPU kernels need in whole vectors, by their names in errors."""
        return {}

    def within(self, context: int) -> Block:
        """Return the block for sequences of at most `context` tokens."""
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """In files, a block is its fields and, as `block`, the name of its class."""
        if cls is not Block:
            return handler(source)
        for module in iter_modules([str(Path(__file__).parent)]):
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
    """K, already rotated, and V of a layer, as in the cache: [tokens, kv_heads, head_dim]."""

    keys: F32
    values: F32


@dataclass(slots=True, kw_only=True)
class ReferenceLayer:
    """What the numpy reference gives the blocks of a layer: its weights, by names without `blk.N.`, and past.

    `past` [2, positions, kv_heads, head_dim] is K and V of the preceding positions; None is for a sequence
    from position 0. A block that stores keys and values sets `cached`, rounded to 8 bits for a quantised
    cache.
    """

    weights: Mapping[str, F32]
    rms_norm_eps: float
    max_position_embeddings: int
    past: F32 | None = None
    has_quantised_cache: bool = False
    cached: CachedTokens | None = None

    def normed(self, x: F32, weight: str) -> F32:
        """Return the RMS norm of `x` by a weight; `x` itself if the layer has no such weight."""
        found = self.weights.get(weight)
        return x if found is None else rms_norm(self.rms_norm_eps, x, found)
