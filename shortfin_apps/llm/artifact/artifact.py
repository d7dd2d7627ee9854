"""`Artifact`: the directory that `build` writes and `serve` opens (file_names.py lists its files)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from shortfin_apps.llm.artifact.advice import advice, rebuild_command
from shortfin_apps.llm.artifact.compiled_config import load_compiled_config
from shortfin_apps.llm.artifact.file_names import (
    CONFIG,
    MANIFEST,
    SELF_TEST,
    TEXTS,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from shortfin_apps.llm.artifact.file_record import FileRecord, wrong_sizes
from shortfin_apps.llm.artifact.program_record import (
    ProgramRecord,
    choose_program,
    reasons_against,
)
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.host_cpu import HostCpu, this_host
from shortfin_apps.llm.contract.iree_release import runtime_release
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec

logger = logging.getLogger(__name__)

FORMAT_VERSION = 3  # to be raised whenever manifests of the previous version cannot be read


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """The source of the weights: `uri` as given to `build`, and `sha256` of everything read from it."""

    uri: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The provenance of an artefact. Equal artefacts have equal `identity`.

    `programs` lists the programs, for several kinds of CPU the best first. `in_use` is not in the file: it is
    the program that was chosen for this host, None for the first.
    """

    format_version: int
    identity: str
    product_version: str
    versions: dict[str, str]  # of the libraries used by the build
    source: SourceRecord
    spec: ModelSpec
    options: BuildOptions
    entries: tuple[str, ...]
    vocab_size: int
    files: dict[str, FileRecord]
    programs: Annotated[tuple[ProgramRecord, ...], Field(min_length=1)]
    in_use: ProgramRecord | None = field(default=None, compare=False)

    @property
    def program(self) -> ProgramRecord:
        """The program in use."""
        return self.in_use or self.programs[0]

    @property
    def file_names(self) -> set[str]:
        """The artefact's files, except the manifest."""
        optional = {SELF_TEST} & self.files.keys()
        return {*TEXTS, *optional, *(name for program in self.programs for name in program.files)}

    def load_config(self, path: Path) -> ModelConfig:
        """Reads a `config.json`. Raises ArtifactError if the programs were compiled for other values."""
        return load_compiled_config(path, self.files.get(CONFIG), self.spec, self.options)

    @classmethod
    def load(cls, path: Path, *, lists_files: bool = True) -> Manifest:
        """Reads a `manifest.json` of this version's format.

        Raises ArtifactError, with `lists_files` also for an unlisted file.
        """
        try:
            text = path.read_bytes()
            version = _FORMAT.validate_json(text).get("format_version", FORMAT_VERSION)
            if version != FORMAT_VERSION:
                raise ArtifactError(
                    f"{path}: built by another version of shortfin-llm (format {version}, and this version "
                    f"reads {FORMAT_VERSION}); build it again with `shortfin-llm build`"
                )
            manifest = _MANIFEST.validate_json(text)
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from error
        except ValidationError as error:
            problem = error.errors()[0]
            name = ".".join(str(part) for part in problem["loc"]) or "the whole"
            raise ArtifactError(
                f"{path}: `{name}`: {problem['msg']}; rebuild with `shortfin-llm build`"
            ) from None
        for name in sorted(manifest.file_names - manifest.files.keys() if lists_files else ()):
            raise ArtifactError(f"{path}: `files` has no {name}; rebuild with `shortfin-llm build`")
        return manifest

    def to_json(self) -> bytes:
        return _MANIFEST.dump_json(self, indent=2, exclude={"in_use"}) + b"\n"


_FORMAT = TypeAdapter(dict[str, object])
_MANIFEST = TypeAdapter(Manifest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """The files a server needs; all paths exist. `manifest` is None if the VMFB has none next to it.

    `self_test` is None if the artefact was built without, or consists of loose files. `choice` explains which
    of several programs suits this CPU best, and why the others do not.
    """

    vmfb: Path
    parameters: tuple[Path, ...]
    config: ModelConfig
    tokenizer: Path
    tokenizer_config: Path | None
    manifest: Manifest | None
    is_loose: bool = False
    choice: str | None = None
    self_test: Path | None = None

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        for_this_host: bool = True,
        check_sizes: bool = True,
        host: HostCpu | None = None,
        cpu: str | None = None,
    ) -> Artifact:
        """Opens a directory written by `shortfin-llm build`.

        From programs for several kinds of CPU, opens the best that `host`, by default this one, can execute;
        if `for_this_host` is False, the one for `cpu`, by default the first. Raises ArtifactError if a file
        is missing or damaged, another version wrote the manifest, or it was compiled by another release of
        IREE than the installed one, or for CPU features that this host lacks (the last two are not checked if
        `for_this_host` is False).
        """
        _check_is_artifact(directory)
        manifest = Manifest.load(directory / MANIFEST)
        has_self_test = SELF_TEST in manifest.files
        for name in (*TEXTS, SELF_TEST) if has_self_test else TEXTS:
            _require(directory / name)
        if for_this_host:
            _check_release(directory, manifest)
            program, choice = _program_for(directory, manifest, host or this_host())
        else:
            program, choice = _named_program(directory, manifest, cpu), None
        for name in program.files:
            _require(directory / name)
            if check_sizes:
                _check_size(directory / name, manifest)
        return cls(
            vmfb=directory / program.vmfb,
            parameters=(directory / program.parameters,),
            config=manifest.load_config(directory / CONFIG),
            tokenizer=directory / TOKENIZER,
            tokenizer_config=directory / TOKENIZER_CONFIG,
            manifest=replace(manifest, in_use=program),
            choice=choice,
            self_test=directory / SELF_TEST if has_self_test else None,
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
        """Opens files given one by one, as with upstream's flags.

        If there is a manifest next to the VMFB, checks its compiler, its CPU, the sizes of the files next to
        it, and that they belong together. `tokenizer_config_json` defaults to `<stem>_config.json` next to
        the tokenizer, if it exists. Raises ArtifactError.
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
            program = _program_in(vmfb.resolve(), manifest)
            _check_parameters(vmfb, parameters, program, manifest)
            _check_host(vmfb, manifest, (program,), this_host())
            manifest = replace(manifest, in_use=program)
        neighbour = tokenizer_json.with_name(f"{tokenizer_json.stem}_config.json")
        return cls(
            vmfb=vmfb,
            parameters=parameters,
            config=manifest.load_config(model_config) if manifest else ModelConfig.load(model_config),
            tokenizer=tokenizer_json,
            tokenizer_config=tokenizer_config_json or (neighbour if neighbour.is_file() else None),
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
    """Returns True if the manifest next to `vmfb` has a record for `path`."""
    path = path.resolve()
    return path.parent == vmfb.resolve().parent and path.name in manifest.files


def _manifest_beside(vmfb: Path) -> Manifest | None:
    """Returns the VMFB's manifest, or None if missing or another tool's. Raises ArtifactError if damaged."""
    path = vmfb.with_name(MANIFEST)
    if _is_ours(path) and vmfb.name in (manifest := Manifest.load(path)).files:
        return manifest
    logger.info("%s: there is no %s in its folder, so its CPU and content are not checked", vmfb, MANIFEST)
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
    """Raises ArtifactError unless the compiler has the runtime's release, which a runtime requires."""
    compiler, runtime = manifest.versions.get("iree-base-compiler", "unknown"), runtime_release()
    if not compiler.startswith(f"{runtime}."):
        command = rebuild_command(directory, manifest.source.uri, manifest.options)
        raise ArtifactError(
            f"{directory}: compiled by IREE {compiler}, which IREE {runtime}, the one installed here, cannot "
            f"load; rebuild it with `{command}`"
        )


def _program_for(directory: Path, manifest: Manifest, host: HostCpu) -> tuple[ProgramRecord, str | None]:
    """Returns the program for this CPU, and a sentence on the choice. Raises ArtifactError."""
    program = _check_host(directory, manifest, manifest.programs, host)
    if len(manifest.programs) == 1:
        return program, None
    _tell_unused(directory, manifest, program)
    others = "; ".join(reasons_against(manifest.programs, program, host))
    return program, f"the program for {program.target.description} suits this CPU best; {others}"


def _tell_unused(directory: Path, manifest: Manifest, program: ProgramRecord) -> None:
    names = {name for each in manifest.programs for name in each.files} - set(program.files)
    unused = {name: manifest.files[name] for name in sorted(names) if name in manifest.files}
    for name, reason in wrong_sizes(directory, unused).items():
        logger.warning("%s %s; it is for another CPU, and not used here", directory / name, reason)


def _named_program(directory: Path, manifest: Manifest, cpu: str | None) -> ProgramRecord:
    programs = manifest.programs
    if cpu is None:
        return programs[0]
    for program in programs:
        if program.target.name == cpu:
            return program
    names = ", ".join(program.target.name for program in programs)
    raise ArtifactError(f"{directory}: has no program for {cpu}; it was built for {names}")


def _program_in(vmfb: Path, manifest: Manifest) -> ProgramRecord:
    """Returns the program in that file, listed by the manifest next to it."""
    programs = manifest.programs
    return next((each for each in programs if each.vmfb == vmfb.name), programs[0])


def _check_parameters(
    vmfb: Path, parameters: tuple[Path, ...], program: ProgramRecord, manifest: Manifest
) -> None:
    """Refuses parameters stored for another CPU's program: sizes may match even if layouts do not."""
    others = {each.parameters for each in manifest.programs} - {program.parameters}
    for path in parameters:
        if is_covered(path, vmfb, manifest) and path.resolve().name in others:
            raise ArtifactError(
                f"{path}: stored for the program of another CPU than {vmfb.name}; give "
                f"{path.with_name(program.parameters)}"
            )


def _check_host(
    path: Path, manifest: Manifest, programs: Sequence[ProgramRecord], host: HostCpu
) -> ProgramRecord:
    """Returns the program for this CPU. Raises ArtifactError if it can run none."""
    first = programs[0].target
    if host.is_of_another_architecture(first.architecture):
        raise ArtifactError(
            f"{path}: compiled for {first.cpu}, a CPU of another architecture ({first.architecture}); "
            f"{_build_here(path, manifest)}"
        )
    if program := choose_program(programs, host):
        return program
    if len(programs) > 1:
        needs = "; ".join(reasons_against(programs, None, host))
        raise ArtifactError(
            f"{path}: this CPU lacks what each of its programs needs: {needs}; "
            f"{_build_here(path, manifest, _with_this_host(programs))}"
        )
    raise ArtifactError(
        f"{path}: compiled for a CPU ({first.cpu}) with {', '.join(host.missing(first.features))}, "
        f"which this CPU lacks; {_build_here(path, manifest)}"
    )


def _build_here(path: Path, manifest: Manifest, device: str = "cpu") -> str:
    directory = path if path.is_dir() else path.parent
    command = rebuild_command(directory, manifest.source.uri, replace(manifest.options, device=device))
    return f"rebuild it here with `{command}`"


def _with_this_host(programs: Sequence[ProgramRecord]) -> str:
    """Returns the device for building the same programs here, plus one for this CPU."""
    names = [program.target.name for program in programs]
    return f"cpu:{','.join(dict.fromkeys([*names, 'host']))}"


def _require(path: Path) -> None:
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; `shortfin-llm build` makes one")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ArtifactError(
            f"{path}: its path is not UTF-8, which libraries that read it need; rename it"
        ) from None


def _check_size(path: Path, manifest: Manifest) -> None:
    record = manifest.files.get(path.name)
    if record is None or path.stat().st_size != record.size_bytes:
        raise ArtifactError(f"{path}: its size differs from {MANIFEST}; rebuild with `shortfin-llm build`")
