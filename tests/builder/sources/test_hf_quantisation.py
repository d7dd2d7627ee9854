from __future__ import annotations

from typing import Any

import pytest

from shortfin_apps.llm.builder.sources.hf_quantisation import matrix_format
from shortfin_apps.llm.builder.sources.hf_quantised import Awq, Fp8, Gptq, MatrixFormat, PackedInt4
from shortfin_apps.llm.contract.errors import BuildError


def compressed(form: str, **weights: object) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, None),
        (GPTQ, Gptq(128, 1)),
        (GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1}, Gptq(None, 0)),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM"}, Awq(64)),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, Fp8(None)),
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, Fp8((128, 128))),
        (compressed("pack-quantized", **INT4, strategy="group", group_size=32), PackedInt4(32)),
        (compressed("pack-quantized", **INT4, strategy="channel"), PackedInt4(None)),
        (compressed("float-quantized", num_bits=8, type="float", strategy="channel"), Fp8(None)),
        (compressed("naive-quantized", num_bits=8, type="float", strategy="tensor"), Fp8(None)),
        (
            compressed(
                "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 64]
            ),
            Fp8((128, 64)),
        ),
    ],
)
def test_formats(config: dict[str, Any] | None, expected: MatrixFormat | None) -> None:
    assert matrix_format("x", config) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPTQ | {"bits": 8}, r"`gptq` \(8 bits\)"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"`awq` \(4 bits, version gemv\)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "`bitsandbytes` is not supported"),
        (
            compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
            "int-quantized, int8",
        ),
        (compressed("pack-quantized", num_bits=8, type="int", strategy="group"), "int8"),
        ({"quant_method": "mxfp4"}, "`mxfp4`"),
        ({"bits": 4}, "`quant_method`: Field required"),
        (GPTQ | {"group_size": "many"}, "`group_size`"),
    ],
)
def test_others_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        matrix_format("x", config)
