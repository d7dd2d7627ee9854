"""Writes matrix_layouts.json: where AMD's matrix instruction calculator places the elements of matrices.

    git clone https://github.com/ROCm/amd_matrix_instruction_calculator calculator
    cd emulated_gpu/emulated_gpu_tests/wave && python make_matrix_layouts.py calculator > matrix_layouts.json

(The calculator needs PyPI's `tabulate`.) Every layout is linear over bits, so a matrix needs one line: the
coordinates [row or column, k or column, block] that each bit of the lane, and each bit of the element's
number in a lane's registers, adds. Bits of a lane that only replicate add [0, 0, 0]; an unused bit is null.
"""

from __future__ import annotations

import json
import re
import sys
from types import ModuleType
from typing import Any

ARCHITECTURES = {
    "cdna2": ("InstCalcGfx9", (64,)),
    "cdna3": ("InstCalcGfx9", (64,)),
    "rdna3": ("InstCalcGfx11", (32, 64)),
    "rdna4": ("InstCalcGfx12", (32, 64)),
}

Coordinates = tuple[int, int, int]
Places = dict[tuple[int, int], Coordinates]  # by element in a lane's registers, and lane


def main(folder: str) -> None:
    sys.path.insert(0, folder)
    import matrix_calculator  # type: ignore[import-not-found]

    layouts = {
        f"{architecture} {name} {lanes}": _layouts(matrix_calculator, architecture, name, lanes)
        for architecture, (_, widths) in ARCHITECTURES.items()
        for name in matrix_calculator.dict_insts[architecture]
        for lanes in widths
    }
    print("{\n" + ",\n".join(f'"{name}": {json.dumps(each)}' for name, each in layouts.items()) + "\n}")


def _layouts(tool: ModuleType, architecture: str, name: str, lanes: int) -> dict[str, Any]:
    about = tool.dict_insts[architecture][name]
    calculator = getattr(tool, ARCHITECTURES[architecture][0])(name, about, lanes)
    layouts: dict[str, Any] = {"shape": [about["m"], about["n"], about["k"], about["blocks"]]}
    for matrix in "bd" if about["sparse"] else "abd":
        bits = tool.get_data_size(about["in_type"] if matrix in "ab" else about["out_type"])
        places = _places(calculator, matrix, about, bits)
        layouts[matrix] = {"bits": bits, **_basis(places)}
    return layouts


def _places(calculator: Any, matrix: str, about: dict[str, int], bits: int) -> Places:
    rows = about["n"] if matrix == "b" else about["m"]
    columns = about["n"] if matrix == "d" else about["k"]
    places = {}
    for block in range(about["blocks"]):
        for row in range(rows):
            for column in range(columns):
                i, j, k = {"a": (row, 0, column), "b": (0, row, column), "d": (row, column, 0)}[matrix]
                _, register, lanes = calculator._get_reg_lanes(matrix, i, j, k, block, 0, 0, 0, 0)
                for lane in lanes:
                    places[_first_bit(register) // bits, lane] = (row, column, block)
    return places


def _first_bit(register: str) -> int:
    """Of "v3.[31:16]", "v[3:2]" or "v3"."""
    pair = re.fullmatch(r"v\[\d+:(\d+)\]", register)
    if pair:
        return 32 * int(pair[1])
    number, low = re.fullmatch(r"v(\d+)(?:\.\[\d+:(\d+)\])?", register).groups()  # type: ignore[union-attr]
    return 32 * int(number) + int(low or 0)


def _basis(places: Places) -> dict[str, list[Coordinates | None]]:
    elements = max(element for element, _ in places).bit_length()
    basis = {
        "element": [places.get((1 << bit, 0)) for bit in range(elements)],
        "lane": [places.get((0, 1 << bit)) for bit in range(max(lane for _, lane in places).bit_length())],
    }
    for (element, lane), place in places.items():
        used = [each for bit, each in enumerate(basis["element"]) if element >> bit & 1]
        used += [each for bit, each in enumerate(basis["lane"]) if lane >> bit & 1]
        assert place == tuple(sum(each[axis] for each in used if each) for axis in range(3))
    return basis


if __name__ == "__main__":
    main(sys.argv[1])
