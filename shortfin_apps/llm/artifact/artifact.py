"""`Artifact`: the directory that `build` writes and `serve` opens (file_names.py lists its files)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from shortfin_apps.llm.artifact.advice import advice
from shortfin_apps.llm.artifact.file_names import (
    CONFIG,
    FILES,
    MANIFEST,
    PARAMETERS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VMFB,
)
from shortfin_apps.llm.artifact.file_record import FileRecord
from shortfin_apps.llm.artifact.rebuild import rebuild_command
from shortfin_apps.llm.builder.model.spec import BuildOptions, ModelSpec
from shortfin_apps.llm.config import ModelConfig
from shortfin_apps.llm.errors import ArtifactError
from shortfin_apps.llm.host_cpu import is_of_another_architecture, missing_features
from shortfin_apps.llm.iree_release import runtime_release

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRecord:
    """The target that the program was compiled for; `features` are LLVM's names, empty for a GPU."""

    device: str
    architecture: str
    cpu: str
    features: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """The source of the weights: `uri` as given to `build`, and `sha256` of everything read from it."""

    uri: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Manifest: the provenance of an artefact. Equal artefacts have equal `identity`."""

    format_version: int
    identity: str
    product_version: str
    versions: dict[str, str]  # of the libraries used by the build
    source: SourceRecord
    spec: ModelSpec
    options: BuildOptions
    target: TargetRecord
    compile_flags: tuple[str, ...]
    entries: tuple[str, ...]
    vocab_size: int
    files: dict[str, FileRecord]
    kernels: tuple[str, ...] = ()  # for each kind of operation what computes it, and why

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Reads a `manifest.json`. Raises ArtifactError."""
        try:
            text = path.read_bytes()
            version = _FORMAT.validate_json(text).get("format_version")
            if isinstance(version, int) and version > FORMAT_VERSION:
                raise ArtifactError(
                    f"{path}: format {version} is newer than this version of shortfin-llm reads "
                    f"({FORMAT_VERSION}); upgrade it or rebuild the artefact"
                )
            return _MANIFEST.validate_json(text)
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from error
        except ValidationError as error:
            problem = error.errors()[0]
            name = ".".join(str(part) for part in problem["loc"]) or "the whole"
            raise ArtifactError(
                f"{path}: `{name}`: {problem['msg']}; rebuild with `shortfin-llm build`"
            ) from None

    def to_json(self) -> bytes:
        return _MANIFEST.dump_json(self, indent=2) + b"\n"


_FORMAT = TypeAdapter(dict[str, object])
_MANIFEST = TypeAdapter(Manifest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """The files a server needs; all paths exist. `manifest` is None if the VMFB has none beside it."""

    vmfb: Path
    parameters: tuple[Path, ...]
    config: ModelConfig
    tokenizer: Path
    tokenizer_config: Path | None
    manifest: Manifest | None
    is_loose: bool = False

    @classmethod
    def open(cls, directory: Path, *, for_this_host: bool = True, check_sizes: bool = True) -> Artifact:
        """Opens a directory written by `shortfin-llm build`.

        Raises ArtifactError when a file is missing or damaged, the format is newer than this program, or it
        was compiled by another release of IREE than the one that runs here, or for a CPU with features that
        this one lacks (the last two are not checked if `for_this_host` is False).
        """
        _check_is_artifact(directory)
        manifest = Manifest.load(directory / MANIFEST)
        for name in FILES:
            _require(directory / name)
        for name in (VMFB, PARAMETERS) if check_sizes else ():
            _check_size(directory / name, manifest)
        if for_this_host:
            _check_release(directory, manifest)
            _check_host(directory, manifest.target)
        return cls(
            vmfb=directory / VMFB,
            parameters=(directory / PARAMETERS,),
            config=ModelConfig.load(directory / CONFIG),
            tokenizer=directory / TOKENIZER,
            tokenizer_config=directory / TOKENIZER_CONFIG,
            manifest=manifest,
        )

    @classmethod
    def from_files(
        cls,
        *,
        vmfb: Path,
        parameters: tuple[Path, ...],
        model_config: Path,
        tokenizer_json: Path,
        tokenizer_config_json: Path | None = None,
        check_sizes: bool = True,
    ) -> Artifact:
        """Opens files given one by one, as upstream's flags do.

        If there is a manifest beside the VMFB, its compiler, its CPU and the sizes of the files beside it are
        checked. `tokenizer_config_json` defaults to `<stem>_config.json` beside the tokenizer, if it exists.
        Raises ArtifactError.
        """
        if not parameters:
            raise ArtifactError("no parameters were given; name at least one .irpa file")
        for path in (vmfb, *parameters, model_config, tokenizer_json):
            _require(path)
        if tokenizer_config_json is not None:
            _require(tokenizer_config_json)
        manifest = _manifest_beside(vmfb.resolve())
        if manifest is not None:
            for path in (vmfb, *parameters) if check_sizes else ():
                if is_covered(path, vmfb, manifest):
                    _check_size(path.resolve(), manifest)
            _check_release(vmfb.parent, manifest)
            _check_host(vmfb, manifest.target)
        beside = tokenizer_json.with_name(f"{tokenizer_json.stem}_config.json")
        return cls(
            vmfb=vmfb,
            parameters=parameters,
            config=ModelConfig.load(model_config),
            tokenizer=tokenizer_json,
            tokenizer_config=tokenizer_config_json or (beside if beside.is_file() else None),
            manifest=manifest,
            is_loose=True,
        )

    @property
    def name(self) -> str:
        """The model's name from its source; for loose files, the VMFB's file name."""
        return self.vmfb.stem if self.manifest is None or self.is_loose else self.manifest.spec.name

    @property
    def vocab_size(self) -> int | None:
        """Number of rows of the model's embedding; None without a manifest."""
        return self.manifest.vocab_size if self.manifest else None


def is_covered(path: Path, vmfb: Path, manifest: Manifest) -> bool:
    """Whether the manifest beside `vmfb` has a record for `path`."""
    path = path.resolve()
    return path.parent == vmfb.resolve().parent and path.name in manifest.files


def _manifest_beside(vmfb: Path) -> Manifest | None:
    """The VMFB's manifest, None if there is none or it is another tool's. Raises ArtifactError if damaged."""
    path = vmfb.with_name(MANIFEST)
    if _is_ours(path) and vmfb.name in (manifest := Manifest.load(path)).files:
        return manifest
    logger.info("%s: there is no %s beside it, so its CPU and content are not checked", vmfb, MANIFEST)
    return None


def _is_ours(path: Path) -> bool:
    try:
        return path.is_file() and "format_version" in _FORMAT.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return False


def _check_is_artifact(directory: Path) -> None:
    try:
        if not (directory / MANIFEST).exists():
            raise ArtifactError(advice(directory))
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        raise ArtifactError(f"{str(directory)!r}: cannot be read ({error})") from error


def _check_release(directory: Path, manifest: Manifest) -> None:
    """A runtime loads what the compiler of its own release made."""
    compiler, runtime = manifest.versions.get("iree-base-compiler", "unknown"), runtime_release()
    if not compiler.startswith(f"{runtime}."):
        command = rebuild_command(directory, manifest.source.uri, manifest.options)
        raise ArtifactError(
            f"{directory}: compiled by IREE {compiler}, which IREE {runtime}, the one installed here, cannot "
            f"load; rebuild it with `{command}`"
        )


def _check_host(directory: Path, target: TargetRecord) -> None:
    if is_of_another_architecture(target.architecture):
        raise ArtifactError(
            f"{directory}: compiled for {target.cpu}, a CPU of another architecture ({target.architecture}); "
            "rebuild it here with `shortfin-llm build`"
        )
    if missing := missing_features(target.features):
        raise ArtifactError(
            f"{directory}: compiled for a CPU ({target.cpu}) with {', '.join(missing)}, "
            "which this CPU lacks; rebuild it here with `shortfin-llm build`"
        )


def _require(path: Path) -> None:
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; `shortfin-llm build` makes one")


def _check_size(path: Path, manifest: Manifest) -> None:
    record = manifest.files.get(path.name)
    if record is None or path.stat().st_size != record.size_bytes:
        raise ArtifactError(f"{path}: its size differs from {MANIFEST}; rebuild with `shortfin-llm build`")
