"""The settings of a server: one dataclass per subject.

`config_sources.py` reads the settings from flags, variables and files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_origin

from pydantic import ConfigDict, Field, SecretStr, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.contract.host_gpu import AUTO
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.http.auth import TENANT_HEADER
from shortfin_apps.llm.serving.server.settings import HttpSettings, ModelSettings, RequestSettings
from shortfin_apps.llm.setting import Setting, make, settings_of, shown

ENV_PREFIX = "SHORTFIN_LLM_"
KEYS = ("api_key", "admin_api_key", "gateway_key")
# Settings that `serve SOURCE` passes to `build`, along with the device.
BUILD_SETTINGS = ("weights", "kv", "context_length")
# Switches with vLLM's names, and the setting and the value that each stands for.
SWITCHES: dict[str, tuple[str, Any]] = {"enforce_eager": ("static_threshold", 0)}


class ServerConfigError(LlmError):
    """Settings that prevent the server from starting."""


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def key_file(key: SecretStr) -> Path | None:
    """Return the file that a key of the form `@FILE` names; None for any other key."""
    text = key.get_secret_value()
    return Path(text[1:]) if text.startswith("@") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Settings by name, from variables or a file, and how errors name them.

    `written`: the names of settings as the source has them. `prefix`: a variable's text before a name.
    """

    values: Mapping[str, Any] = field(default_factory=dict, repr=False)
    written: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    file: Path | None = None

    def called(self, name: str) -> str:
        """Return the file, if any, and the name of a setting for an error."""
        return f"{self._place}`{self._spelled(name)}`"

    def no_setting(self, name: str) -> ServerConfigError:
        """Return the error for a name that is not a setting's. It names the nearest setting."""
        near = get_close_matches(name, [*ServerConfig.SETTINGS, *SWITCHES], 1)
        hint = f" (did you mean `{self._spelled(near[0])}`?)" if near else ""
        unknown = f"there is no setting `{self._spelled(name)}`{hint}"
        return ServerConfigError(f"{self._place}{unknown}; `serve --help-all` lists them")

    @property
    def _place(self) -> str:
        return "" if self.file is None else f"{self.file}: "

    def _spelled(self, name: str) -> str:
        return self.written.get(name, f"{self.prefix}{name.upper()}" if self.prefix else name)


EMPTY = Source()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of a server by subject.

    `given`: values of the settings that flags, variables or files set, by name. `source`: the source that
    `serve SOURCE` built the model from; None for a model directory.
    """

    model: ModelSettings
    http: HttpSettings
    engine: EngineSettings
    requests: RequestSettings
    given: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    source: str | None = None

    SETTINGS: ClassVar[dict[str, Setting]]  # by name, in the order of the help

    @classmethod
    def of(cls, values: Mapping[str, Any], sources: Mapping[str, Source] | None = None) -> Self:
        """Check and convert settings by name. Raises ServerConfigError for the first invalid one.

        `sources`: sources of the settings that were not given as flags.
        """
        sources = sources or {}
        for name in values:
            if name not in cls.SETTINGS:
                raise sources.get(name, EMPTY).no_setting(name)
        given = {
            name: _checked(each, values[name], called_in(sources, name))
            for name, each in cls.SETTINGS.items()
            if name in values
        }
        try:
            return cls(given=given, **{name: make(kind, given) for name, kind in SUBJECTS.items()})
        except ValueError as error:  # settings that exclude or need each other
            raise ServerConfigError(str(error)) from None

    def changed(self, **values: Any) -> Self:
        """Return a copy with other values. Raises ServerConfigError."""
        return self.of({**self.given, **values})

    def to_json(self) -> dict[str, Any]:
        """Return the values of all settings by name as JSON types; secrets become asterisks."""
        values = {
            name: value for subject in SUBJECTS for name, value in shown(getattr(self, subject)).items()
        }
        json: dict[str, Any] = to_jsonable_python(values)
        return json

    @property
    def api_processes(self) -> int:
        """Processes that answer HTTP; 0 if the engine's own process does.

        A GPU's engine needs Python's lock for itself: it plans steps while the device works. On CPUs, another
        process would only compete with the model.
        """
        chosen = self.http.api_processes
        return int(self.engine.is_on_gpu) if chosen is None else chosen

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Yield flags that have no effect because of another setting, each with the reason."""
        engine, http, events = self.engine, self.http, self.engine.kv_events
        if engine.device_ids and not engine.is_on_gpu and engine.device != AUTO:
            yield "--device-ids", f"it chooses GPUs, and the device is {engine.device}"
        if engine.threads is not None and (engine.is_on_gpu or engine.runtime == "shortfin"):
            yield "--threads", "only the iree runtime on a CPU takes it"
        proposes = engine.speculative != "off" or engine.speculative_model is not None
        if not proposes and "speculative_tokens" in self.given:
            yield (
                "--speculative-tokens",
                "nothing is proposed without `--speculative` or `--speculative-model`",
            )
        if http.tenant_header != TENANT_HEADER and not http.gateway_key:
            yield "--tenant-header", "there is no `--gateway-key` with which it would be believed"
        if self.api_processes > 1 and self.given.get("stored_responses"):
            yield "--stored-responses", "API processes share no memory, so they store no responses"
        if events.kv_events_endpoint is None:
            for name in ("kv_events_replay_endpoint", "kv_events_topic"):
                if name in self.given:
                    yield flag(name), "no KV events are published without `--kv-events-endpoint`"
        elif engine.prefix_cache == "none":
            yield "--kv-events-endpoint", "no pages are shared with `--prefix-cache none`"


def plain(value: object) -> str:
    """Return a setting's value as text for another process, secrets included; the `default` of json.dumps."""
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)


SUBJECTS: dict[str, type] = {
    "model": ModelSettings,
    "http": HttpSettings,
    "engine": EngineSettings,
    "requests": RequestSettings,
}
ServerConfig.SETTINGS = {each.name: each for subject in SUBJECTS.values() for each in settings_of(subject)}


def called_in(sources: Mapping[str, Source], name: str) -> str:
    """Return a setting's name for an error: as its source has it, otherwise its flag."""
    return sources[name].called(name) if name in sources else f"`{flag(name)}`"


def _checked(of: Setting, value: Any, called: str) -> Any:
    """Check a setting's value and convert it to the setting's type. Raises ServerConfigError."""
    try:
        value = _read(of, value)
        type_of: Any = Annotated[of.type, Field(**of.checks)]
        return TypeAdapter(type_of, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]
        message = str(problem["msg"])
        value = problem["input"]
    except ValueError as error:
        message = str(error)
    given = "" if of.name in KEYS or value in ("", None) else f", not {value!r}"
    raise ServerConfigError(f"{called}: {message}{given}") from None


def _read(of: Setting, value: Any) -> Any:
    """Return the value as given, but split a string of several values at commas. Raises ValueError."""
    is_several = get_origin(of.type) is tuple
    if (value is None and of.name in KEYS) or (value == "" and not _may_be_empty(of)):
        # An empty variable or template must not act as the default: an empty host would mean all addresses.
        raise ValueError("it is set but empty; give a value, or do not set it at all")
    if of.name in KEYS:
        keys = value.split(",") if isinstance(value, str) else value
        # Empty keys are refused: dropping one could leave the server open.
        if not keys or "" in [k.get_secret_value() if isinstance(k, SecretStr) else k for k in keys]:
            raise ValueError("a key in it is empty; give each key, or do not set it at all")
        return keys
    if is_several and isinstance(value, str):
        return tuple(part for part in value.split(",") if part)
    return value if of.read is None or value is None else of.read(value)


def _may_be_empty(of: Setting) -> bool:
    """Return whether an empty string is valid: it stands for no prefix, or for no values."""
    return of.name not in KEYS and (of.default in ("", (), {}))
