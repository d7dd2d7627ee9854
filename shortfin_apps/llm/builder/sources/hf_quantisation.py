"""The format of quantised matrices, from `quantization_config` of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt

from shortfin_apps.llm.builder.sources.base import parse, unsupported
from shortfin_apps.llm.builder.sources.hf_quantised import Awq, Fp8, Gptq, MatrixFormat, PackedInt4


class _Weights(BaseModel):
    """The weights of a compressed-tensors group."""

    num_bits: int
    type: str = "int"
    strategy: str | None = None
    group_size: int | None = None
    block_structure: tuple[PositiveInt, PositiveInt] | None = None


class _Group(BaseModel):
    weights: _Weights | None = None


class _Config(BaseModel):
    model_config = ConfigDict(extra="ignore")

    quant_method: str
    bits: int | None = None
    group_size: int | None = None
    checkpoint_format: str = "gptq"
    version: str = "gemm"
    fmt: str = "e4m3"
    weight_block_size: tuple[PositiveInt, PositiveInt] | None = None
    format: str | None = None
    config_groups: dict[str, _Group] = {}
    sparsity_config: dict[str, Any] | None = None


def matrix_format(where: str, raw: dict[str, Any] | None) -> MatrixFormat | None:
    """Return the format of quantised matrices; None if there is no `quantization_config`.

    Raises BuildError naming the format if it is not supported.
    """
    if raw is None:
        return None
    config = parse(f"{where}/config.json: quantization_config", _Config, raw)
    made = _FORMATS.get(config.quant_method, _no_format)(config)
    if made is None:
        raise unsupported(where, f"weights quantised by {_described(config)}")
    return made


def _no_format(_: _Config) -> None:
    return None


def _gptq(config: _Config) -> MatrixFormat | None:
    added = {"gptq": 1, "gptq_v2": 0}.get(config.checkpoint_format)
    return Gptq(_group(config.group_size), added) if config.bits == 4 and added is not None else None


def _awq(config: _Config) -> MatrixFormat | None:
    is_known = config.bits == 4 and config.version.lower() == "gemm"
    return Awq(_group(config.group_size)) if is_known else None


def _fp8(config: _Config) -> MatrixFormat | None:
    return Fp8(config.weight_block_size) if config.fmt == "e4m3" else None


def _compressed_tensors(config: _Config) -> MatrixFormat | None:
    kinds = [group.weights for group in config.config_groups.values() if group.weights is not None]
    if not kinds or any(kind != kinds[0] for kind in kinds) or config.sparsity_config:
        return None
    kind = kinds[0]
    match config.format, kind.type, kind.num_bits, kind.strategy:
        case "pack-quantized", "int", 4, "group" | "channel":
            return PackedInt4(_group(kind.group_size))
        case "float-quantized" | "naive-quantized", "float", 8, "tensor" | "channel":
            return Fp8(None)
        case "float-quantized", "float", 8, "block" if kind.block_structure:
            return Fp8(kind.block_structure)
    return None


_FORMATS: dict[str, Callable[[_Config], MatrixFormat | None]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
}


def _group(size: int | None) -> int | None:
    """Return the group size; None for -1, which stands for all input features."""
    return None if size is None or size < 0 else size


def _described(config: _Config) -> str:
    method = f"`{config.quant_method}`"
    kinds = {
        f"{group.weights.type}{group.weights.num_bits}"
        for group in config.config_groups.values()
        if group.weights
    }
    details = [
        *([f"{config.bits} bits"] if config.bits else []),
        *([f"format {config.format}"] if config.format else []),
        *sorted(kinds),
        *([f"version {config.version}"] if config.quant_method == "awq" else []),
    ]
    return f"{method} ({', '.join(details)})" if details else method
