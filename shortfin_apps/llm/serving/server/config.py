"""Settings of a server: one class that defines flags, variables, YAML keys, `--help` and `/server_info`.

Its fields are in `settings/`, grouped by topic; `config_sources.py` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.runtime.device import GPU_NAMES
from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.serving.api.auth import TENANT_HEADER
from shortfin_apps.llm.serving.server.settings.engine import EngineSettings
from shortfin_apps.llm.serving.server.settings.http import HttpSettings
from shortfin_apps.llm.serving.server.settings.model import ModelSettings
from shortfin_apps.llm.serving.server.settings.requests import RequestSettings

ENV_PREFIX = "SHORTFIN_LLM_"
KEYS = ("api_key", "admin_api_key", "gateway_key")
# Settings that `serve SOURCE` passes to `build`, along with the device.
BUILD_SETTINGS = ("weights", "kv", "context_length")
# Settings for which an empty text is valid: no prefix, an empty list. An empty host would mean all addresses.
MAY_BE_EMPTY = ("root_path", "parameters", "device_ids", "cors_origin", "tenant_weights")


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


class ServerConfigError(LlmError):
    """Settings that prevent the server from starting."""


def key_file(key: SecretStr) -> Path | None:
    """Return the file that a key given as `@FILE` names."""
    text = key.get_secret_value()
    return Path(text[1:]) if text.startswith("@") else None


# pydantic orders fields from the last base class to the first, so `--help` shows the model's first.
class ServerConfig(RequestSettings, EngineSettings, HttpSettings, ModelSettings):
    """Settings of a server; a field's description is the help of its flag."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=False,  # an empty list of keys is wrong only if it was set
    )

    @field_validator("parameters", "device_ids", "cors_origin", "tenant_weights", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        """Split lists in environment variables at commas."""
        return tuple(part for part in value.split(",") if part) if isinstance(value, str) else value

    @field_validator(*KEYS, mode="before")
    @classmethod
    def _split_keys(cls, value: object) -> object:
        """Split keys. Empty ones are kept, to be refused: dropping one could leave the server open."""
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_empty(cls, value: object, info: ValidationInfo) -> object:
        """Refuse empty values: an empty variable or template must not act as the default."""
        is_missing_key = value is None and info.field_name in KEYS
        if is_missing_key or (value == "" and info.field_name not in MAY_BE_EMPTY):
            raise ValueError("it is set but empty; give a value, or do not set it at all")
        return value

    @field_validator(*KEYS)
    @classmethod
    def _refuse_empty_keys(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if not value or not all(key.get_secret_value() for key in value):
            raise ValueError("a key in it is empty; give each key, or do not set it at all")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # `config_sources.load` merges the sources

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Yield flags that have no effect because of another setting, each with the reason."""
        on_gpu = self.device.partition(":")[0] in GPU_NAMES
        if self.device_ids and not on_gpu:
            yield "--device-ids", f"it chooses GPUs, and the device is {self.device}"
        if self.threads is not None and (on_gpu or self.runtime == "shortfin"):
            yield "--threads", "only the iree runtime on a CPU takes it"
        proposes = self.speculative != "off" or self.speculative_model is not None
        if not proposes and "speculative_tokens" in self.model_fields_set:
            yield (
                "--speculative-tokens",
                "nothing is proposed without `--speculative` or `--speculative-model`",
            )
        if self.tenant_header != TENANT_HEADER and not self.gateway_key:
            yield "--tenant-header", "there is no `--gateway-key` with which it would be believed"
        if self.api_processes > 1 and self.stored_responses and "stored_responses" in self.model_fields_set:
            yield "--stored-responses", "API processes share no memory, so they store no responses"
        if self.kv_events_endpoint is None:
            for name in ("kv_events_replay_endpoint", "kv_events_topic"):
                if getattr(self, name) is not None:
                    yield flag(name), "no KV events are published without `--kv-events-endpoint`"
        if self.kv_events_endpoint is not None and self.prefix_cache == "none":
            yield "--kv-events-endpoint", "no pages are shared with `--prefix-cache none`"

    def batch_settings(self) -> BatchSettings:
        return BatchSettings(
            batch_mode=self.batch_mode, chunk_tokens=self.chunk_tokens, token_budget=self.token_budget
        )

    @property
    def weighted_tenants(self) -> tuple[str, ...]:
        """The names of the tenants in `tenant_weights`."""
        return tuple(entry.rpartition("=")[0] for entry in self.tenant_weights)

    def weights_of_tenants(self) -> dict[str, float]:
        pairs = [entry.rpartition("=") for entry in self.tenant_weights]
        return {name: float(weight) for name, _, weight in pairs}
