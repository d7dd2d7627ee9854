"""`Artifact`: the directory that `build` writes and `serve` opens (file_names.py lists its files)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from shortfin_apps.llm.artifact.advice import advice, rebuild_command
from shortfin_apps.llm.artifact.compiled_config import load_compiled_config
from shortfin_apps.llm.artifact.file_names import (
    MANIFEST,
    SELF_TEST,
    TEXTS,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from shortfin_apps.llm.artifact.file_record import FileRecord, wrong_sizes
from shortfin_apps.llm.artifact.program_record import (
    Host,
    ProgramRecord,
    TargetRecord,
    choose_program,
    reasons_against,
)
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.device_names import CPU, by_kind, join_devices, kind_of
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.host_cpu import this_host
from shortfin_apps.llm.contract.host_gpu import HostGpu
from shortfin_apps.llm.contract.iree_release import runtime_release
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec

logger = logging.getLogger(__name__)

FORMAT_VERSION = 4  # to be raised whenever manifests of the previous version cannot be read


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """The source of the weights: `uri` as given to `build`, and `sha256` of all data read from the source."""

    uri: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of `manifest.json`: the provenance of an artefact. Equal artefacts have equal `identity`.

    `programs` has one program, or one for each of several devices: GPUs first, then CPUs, the best first.
    `all_options` has the options for each kind of device. `in_use` is the program chosen for this host, None
    for the first; it is not in the file.
    """

    format_version: int
    identity: str
    product_version: str
    versions: dict[str, str]  # of the libraries used by the build
    source: SourceRecord
    spec: ModelSpec
    all_options: Annotated[tuple[BuildOptions, ...], Field(min_length=1)]
    vocab_size: int
    files: dict[str, FileRecord]
    programs: Annotated[tuple[ProgramRecord, ...], Field(min_length=1)]
    in_use: ProgramRecord | None = field(default=None, compare=False)

    @property
    def program(self) -> ProgramRecord:
        """The program in use."""
        return self.in_use or self.programs[0]

    @property
    def options(self) -> BuildOptions:
        """The options of the program in use."""
        return self.options_of(self.program)

    def options_of(self, program: ProgramRecord) -> BuildOptions:
        """Return the options of one of the programs."""
        target = program.target
        of_kind = (each for each in self.all_options if kind_of(each.device) == target.kind)
        return replace(next(of_kind, self.all_options[0]), device=target.device)

    @property
    def gives_same_bits(self) -> bool:
        """Whether the program in use gives a token the same bits in all entries (docs/determinism.md)."""
        return self.program.target.gives_same_bits or bool(self.options.batch_invariant)

    @property
    def device(self) -> str:
        """The devices of all programs, as in `--device`."""
        return join_devices(program.target.device for program in self.programs)

    @property
    def file_names(self) -> set[str]:
        """The artefact's files, except the manifest."""
        optional = {SELF_TEST} & self.files.keys()
        of_programs = {name for each in self.programs for name in (*each.files, each.config)}
        return {*TEXTS, *optional, *of_programs}

    def load_config(self, path: Path) -> ModelConfig:
        """Read a config. Raises ArtifactError if the program in use was compiled for other values."""
        return load_compiled_config(path, self.files.get(self.program.config), self.spec, self.options)

    @classmethod
    def load(cls, path: Path, *, lists_files: bool = True) -> Manifest:
        """Read a `manifest.json`. Raises ArtifactError for an invalid file or another format version.

        With `lists_files`, also raises ArtifactError if `files` has no record of some file of the artefact.
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
            if not problem["loc"]:  # no JSON, or no object
                raise ArtifactError(
                    f"{path}: is damaged ({problem['msg']}); build it again with `shortfin-llm build`"
                ) from None
            name = ".".join(str(part) for part in problem["loc"])
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
    """The files that a server needs; all paths exist. `manifest` is None if the VMFB has none next to it.

    `is_loose`: the files were given one by one. `self_test` is None if the artefact was built without a
    self-test, or is loose. `choice` explains which of several programs suits this device best; None if there
    is only one.
    """

    vmfb: Path
    parameters: tuple[Path, ...]
    config: ModelConfig
    config_file: Path
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
        host: Host | None = None,
        name: str | None = None,
    ) -> Artifact:
        """Open a directory written by `shortfin-llm build`.

        If the artefact has several programs, chooses the best one that `host` can execute (default: this
        machine's CPU, or any GPU if there are only programs for GPUs). If `for_this_host` is False, the
        artefact is not for execution here: `host` is ignored, and the program for the CPU or chip `name` is
        chosen (default: the first program whose files are there, as a copy may leave out those of other
        devices). `check_sizes` compares the sizes of the program's files with the manifest.

        Raises ArtifactError if a file is missing or damaged, or if another version of shortfin-llm wrote the
        manifest. With `for_this_host`, also raises ArtifactError if the compiler's IREE release is not the
        installed one, or if `host` can execute no program.
        """
        _check_is_artifact(directory)
        manifest = Manifest.load(directory / MANIFEST)
        has_self_test = SELF_TEST in manifest.files
        for text in (*TEXTS, SELF_TEST) if has_self_test else TEXTS:
            _require(directory / text)
        if for_this_host:
            _check_release(directory, manifest)
            program, choice = _program_for(directory, manifest, host or _default_host(manifest))
        else:
            program, choice = _named_program(directory, manifest, name), None
        manifest = replace(manifest, in_use=program)
        for file in program.files:
            _require(directory / file)
            if check_sizes:
                _check_size(directory / file, manifest)
        return cls(
            vmfb=directory / program.vmfb,
            parameters=(directory / program.parameters,),
            config=manifest.load_config(directory / program.config),
            config_file=directory / program.config,
            tokenizer=directory / TOKENIZER,
            tokenizer_config=directory / TOKENIZER_CONFIG,
            manifest=manifest,
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
        """Open files given one by one, as with upstream's flags. Raises ArtifactError.

        If there is a manifest next to the VMFB, checks the VMFB's compiler release and CPU, the sizes of
        files that the manifest lists, and that VMFB and parameters belong together. `tokenizer_config_json`
        defaults to `<stem>_config.json` next to the tokenizer, if this file exists.
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
            if program.target.kind == CPU:
                _check_host(vmfb, manifest, (program,), this_host())
            manifest = replace(manifest, in_use=program)
        neighbour = tokenizer_json.with_name(f"{tokenizer_json.stem}_config.json")
        return cls(
            vmfb=vmfb,
            parameters=parameters,
            config=manifest.load_config(model_config) if manifest else ModelConfig.load(model_config),
            config_file=model_config,
            tokenizer=tokenizer_json,
            tokenizer_config=tokenizer_config_json or (neighbour if neighbour.is_file() else None),
            manifest=manifest,
            is_loose=True,
        )

    @property
    def name(self) -> str:
        """The model's name in its source; for loose files, the VMFB's file name without extension."""
        return self.vmfb.stem if self.manifest is None or self.is_loose else self.manifest.spec.name

    @property
    def missing_files(self) -> tuple[str, ...]:
        """The names of the files that this copy has not; none without a manifest."""
        if self.manifest is None or self.is_loose:
            return ()
        return _missing(self.vmfb.parent, sorted(self.manifest.file_names))

    @property
    def vocab_size(self) -> int | None:
        """Number of rows of the model's embedding; None without a manifest."""
        return self.manifest.vocab_size if self.manifest else None


def is_covered(path: Path, vmfb: Path, manifest: Manifest) -> bool:
    """Return whether `manifest`, which is next to `vmfb`, has a record for `path`."""
    path = path.resolve()
    return path.parent == vmfb.resolve().parent and path.name in manifest.files


def _manifest_beside(vmfb: Path) -> Manifest | None:
    """Return the manifest next to `vmfb`, or None if there is none that lists `vmfb`.

    Raises ArtifactError if the manifest is damaged.
    """
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
    """Raise ArtifactError unless the compiler's release is the runtime's, because others cannot be loaded."""
    compiler, runtime = manifest.versions.get("iree-base-compiler", "unknown"), runtime_release()
    if not compiler.startswith(f"{runtime}."):
        command = rebuild_command(directory, manifest.source.uri, *manifest.all_options)
        raise ArtifactError(
            f"{directory}: compiled by IREE {compiler}, which IREE {runtime}, the one installed here, cannot "
            f"load; rebuild it with `{command}`"
        )


def fitting_host(directory: Path, at_hand: Callable[[str], Iterable[Host]]) -> Host:
    """Return the first device at hand for which the artefact in `directory` has a program.

    `at_hand` lists the devices of a kind. It is called for the kinds of the artefact's programs, GPUs first.
    Raises ArtifactError.
    """
    _check_is_artifact(directory)
    manifest = Manifest.load(directory / MANIFEST)
    found: list[Host] = []
    for kind in dict.fromkeys(each.target.kind for each in manifest.programs):
        for host in at_hand(kind):
            if choose_program(manifest.programs, host):
                for other in found:
                    logger.info("%s has no program for this machine's %s", directory, other.device)
                return host
            found.append(host)
    if found:
        _check_host(directory, manifest, manifest.programs, found[0])
    raise ArtifactError(
        f"{directory}: built for {manifest.device}, and this machine has nothing of that (`--device "
        f"{manifest.programs[0].target.kind}` says why); {_build_here(directory, manifest, this_host())}"
    )


def _default_host(manifest: Manifest) -> Host:
    kinds = [program.target.kind for program in manifest.programs]
    return this_host() if CPU in kinds else HostGpu(kinds[0], chip=None)


def _program_for(directory: Path, manifest: Manifest, host: Host) -> tuple[ProgramRecord, str | None]:
    """Return the best program for `host`, and a sentence that explains the choice, None if there is only one.

    Raises ArtifactError if `host` can execute no program.
    """
    program = _check_host(directory, manifest, manifest.programs, host)
    if len(manifest.programs) == 1:
        return program, None
    _tell_unused(directory, manifest, program)
    device = "CPU" if host.kind == CPU else "GPU"
    reasons = reasons_against(manifest.programs, program, host)
    return program, "; ".join(
        [f"the program for {program.target.description} suits this {device} best", *reasons]
    )


def _tell_unused(directory: Path, manifest: Manifest, program: ProgramRecord) -> None:
    names = {name for each in manifest.programs for name in each.files} - set(program.files)
    unused = {name: manifest.files[name] for name in sorted(names) if name in manifest.files}
    for name, reason in wrong_sizes(directory, unused).items():
        logger.warning("%s %s; it is for another device, and not used here", directory / name, reason)


def _named_program(directory: Path, manifest: Manifest, name: str | None) -> ProgramRecord:
    programs = manifest.programs
    if name is None:
        whole = (each for each in programs if not _missing(directory, (*each.files, each.config)))
        return next(whole, programs[0])
    for program in programs:
        if program.target.name == name:
            return program
    names = ", ".join(program.target.name for program in programs)
    raise ArtifactError(f"{directory}: has no program for {name}; it was built for {names}")


def _missing(directory: Path, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if not (directory / name).is_file())


def _program_in(vmfb: Path, manifest: Manifest) -> ProgramRecord:
    """Return the manifest's record of the program in file `vmfb`; the first if no program has this name."""
    programs = manifest.programs
    return next((each for each in programs if each.vmfb == vmfb.name), programs[0])


def _check_parameters(
    vmfb: Path, parameters: tuple[Path, ...], program: ProgramRecord, manifest: Manifest
) -> None:
    """Raise ArtifactError for another device's parameters, which may differ only in their layout."""
    others = {each.parameters for each in manifest.programs} - {program.parameters}
    for path in parameters:
        if is_covered(path, vmfb, manifest) and path.resolve().name in others:
            raise ArtifactError(
                f"{path}: stored for the program of another device than {vmfb.name}; give "
                f"{path.with_name(program.parameters)}"
            )


def _check_host(
    path: Path, manifest: Manifest, programs: Sequence[ProgramRecord], host: Host
) -> ProgramRecord:
    """Return the best program that `host` can execute. Raises ArtifactError if there is none."""
    if program := choose_program(programs, host):
        return program
    of_kind = [each.target for each in programs if each.target.kind == host.kind]
    raise ArtifactError(f"{path}: {_why_not(programs, of_kind, host)}; {_build_here(path, manifest, host)}")


def _why_not(programs: Sequence[ProgramRecord], of_kind: Sequence[TargetRecord], host: Host) -> str:
    names = ", ".join(each.target.name for each in programs)
    if isinstance(host, HostGpu):
        return f"built for {names}, and this machine has {host.chip or host.device}"
    if not of_kind:
        return f"built for {names}, not for a CPU"
    first = of_kind[0]
    if host.is_of_another_architecture(first.architecture):
        return f"compiled for {first.cpu}, a CPU of another architecture ({first.architecture})"
    if len(of_kind) > 1:
        needs = "; ".join(reasons_against(programs, None, host))
        return f"this CPU lacks what each of its programs needs: {needs}"
    missing = ", ".join(host.missing(first.features))
    return f"compiled for a CPU ({first.cpu}) with {missing}, which this CPU lacks"


def _build_here(path: Path, manifest: Manifest, host: Host) -> str:
    """Suggest a build for this host, together with the artefact's devices if these are several.

    A GPU that no build is for is left out; its machine has a CPU.
    """
    here = host.device if isinstance(host, HostGpu) and host.is_supported else CPU
    targets = [each.target.device for each in manifest.programs]
    of_kind = {kind_of(each.device): each for each in manifest.all_options}
    options = [
        replace(
            of_kind.get(kind_of(devices[0])) or BuildOptions.for_device(devices[0]),
            device=join_devices(devices),
        )
        for devices in by_kind(dict.fromkeys([*targets, here] if len(targets) > 1 else [here]))
    ]
    directory = path if path.is_dir() else path.parent
    return f"rebuild it here with `{rebuild_command(directory, manifest.source.uri, *options)}`"


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
