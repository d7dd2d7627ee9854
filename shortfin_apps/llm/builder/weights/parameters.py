"""The parameters that the compiled model reads, by name, shape and type."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor, tensor_type
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.builder.weights.layout import StoredTypes, WeightLayout, stored_types
from shortfin_apps.llm.contract.abi import PARAMETER_SCOPE
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec, weight_shapes


def parameter_types(spec: ModelSpec, options: BuildOptions, target: Target) -> StoredTypes:
    """Return every parameter of the compiled module: name -> (shape, MLIR dtype), in graph order."""
    types: StoredTypes = {}
    layouts = weight_layouts(spec, options, target)
    for name, shape in weight_shapes(spec).items():
        types |= stored_types(layouts[name], name, shape)
    return types


def weight_layouts(spec: ModelSpec, options: BuildOptions, target: Target) -> dict[str, WeightLayout]:
    """Return the layout of every weight that the target's program reads, by name.

    Programs with equal layouts read the same parameter file.
    """
    return {name: weight_layout(name, spec, options, target) for name in weight_shapes(spec)}


class WeightTypes:
    """The weights of a module, as globals that are initialised from the parameter file."""

    def __init__(self, spec: ModelSpec, options: BuildOptions, target: Target) -> None:
        self._shapes = weight_shapes(spec)
        self._layouts = weight_layouts(spec, options, target)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of all weights."""
        return list(self._shapes.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the weight's logical shape, independent of its storage."""
        return self._shapes[name]

    def layout(self, name: str) -> WeightLayout:
        return self._layouts[name]

    def load(self, e: Emitter, name: str) -> list[Tensor]:
        """Load all parameters of a weight: its elements and, if it is quantised, scales and minima."""
        stored = stored_types(self._layouts[name], name, self._shapes[name])
        return [e.load(parameter, *kind) for parameter, kind in stored.items()]

    def load_one(self, e: Emitter, name: str) -> Tensor:
        """Load a weight that is stored as a single parameter."""
        [parameter] = self.load(e, name)
        return parameter

    def declarations(self) -> list[str]:
        return [
            f'util.global private @"{parameter}" = '
            f'#flow.parameter.named<"{PARAMETER_SCOPE}"::"{parameter}"> : {tensor_type(shape, dtype)}'
            for name, layout in self._layouts.items()
            for parameter, (shape, dtype) in stored_types(layout, name, self._shapes[name]).items()
        ]
