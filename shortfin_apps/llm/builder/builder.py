"""Build an artefact from a source: fetch, write weights, compile, compute the self-test, assemble.

The slow steps are cached by their inputs. Weights: the source's content, the weight types and their layouts.
Program: the model's spec, the options, the target, the compiler and the code that emits the module.
Self-test: the weights, the spec and the cache's type and shape.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import TypeAdapter

from shortfin_apps.llm import __version__
from shortfin_apps.llm.artifact import file_names
from shortfin_apps.llm.artifact.artifact import (
    FORMAT_VERSION,
    Artifact,
    Manifest,
    SourceRecord,
)
from shortfin_apps.llm.artifact.file_record import FileRecord, record, total_bytes, wrong_files
from shortfin_apps.llm.artifact.program_record import ProgramRecord, TargetRecord
from shortfin_apps.llm.builder.cache import (
    BUILD,
    DOWNLOADS,
    BuildCache,
    CacheEntry,
    Use,
    content_key,
    user_cache,
)
from shortfin_apps.llm.builder.device_list import resolve_targets
from shortfin_apps.llm.builder.output import (
    exclusive,
    file_error,
    replace_output,
    resolve_output,
    staging,
    tell_dropped,
)
from shortfin_apps.llm.builder.program.compiler import compile_model
from shortfin_apps.llm.builder.progress import BuildProgress, default_progress
from shortfin_apps.llm.builder.self_test.make import make_self_test
from shortfin_apps.llm.builder.sources.base import ModelSource, TokenizerFiles
from shortfin_apps.llm.builder.sources.catalogue import open_source, open_with_head
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.own_types import with_own_types
from shortfin_apps.llm.builder.weights.parameters import weight_layouts
from shortfin_apps.llm.builder.weights.write import stored_bytes, write_weights
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.device_names import KINDS, join_devices, kind_of, name_of
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.model.config import model_config, with_invariance
from shortfin_apps.llm.model.spec import OWN_TYPES, BuildOptions, WeightType

COMPILE_RECORD = "compile.json"
LIBRARIES = ("iree-base-compiler", "gguf", "safetensors", "tokenizers", "numpy", "ml_dtypes")

_BUILDER = Path(__file__).parent
_PACKAGE = _BUILDER.parent
_CODE_SUFFIXES = (".py", ".j2", ".mlir")
# Files of contract/ that build results depend on.
_CONTRACT = ("abi.py", "irpa.py", "sampling_rule.py", "self_test_file.py", "tokenizer_config.py")
# Code that the parameters, the programs and the self-tests depend on, as `_folder` names it.
WEIGHTS_CODE = ("irpa.py", "model", "quantise.py", "sources", "weights")
PROGRAM_CODE = (
    *("abi.py", "graph", "kernels", "lowering", "model", "program", "sampling_rule.py", "target.py"),
    "weights",
)
SELF_TEST_CODE = (*WEIGHTS_CODE, "self_test", "self_test_file.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRecord:
    """The record stored with a compiled program in the cache."""

    flags: tuple[str, ...]
    entries: tuple[str, ...]
    kernels: tuple[str, ...]
    target: TargetRecord


_COMPILE_RECORD = TypeAdapter(CompileRecord)


def build(
    source: str,
    out: Path,
    options: BuildOptions | Sequence[BuildOptions],
    progress: BuildProgress | None = None,
    *,
    use_cache: bool = True,
    own_types: bool = False,
    accepted: Collection[str] = (),
    self_test: bool = True,
    draft_head: str | None = None,
) -> Artifact:
    """Build `source` into the folder `out` and open the artefact; reuse one there that is up to date.

    All or nothing: `out` holds either the previous artefact or the new one. The artefact may target other
    devices than this host's; from several programs, the first is opened: a GPU's, or the best CPU's.

    `options`: for one kind of device, or for each of several (`BuildOptions.for_devices`).
    `own_types`: weights keep the source's types, whatever `options` say. `accepted`: fields of the model's
    description to ignore although this package does not know them. `self_test`: whether the artefact gets a
    self-test. `draft_head`: the source of an EAGLE-3 head to build into the model. Raises BuildError.
    """
    progress = progress or default_progress()
    try:
        out = resolve_output(out)
        each_options = [options] if isinstance(options, BuildOptions) else options
        plan = _plan(source, each_options, progress, own_types, accepted, self_test, draft_head)
        with exclusive(out, lambda: progress.note(f"waiting for another build of {out}")):
            return _build(plan, out, progress, use_cache)
    except OSError as error:
        raise file_error(error, out) from error


def _plan(
    source: str,
    each_options: Sequence[BuildOptions],
    progress: BuildProgress,
    own_types: bool,
    accepted: Collection[str],
    self_test: bool,
    draft_head: str | None,
) -> _Plan:
    model = open_source(source, user_cache() / DOWNLOADS, progress, accepted)
    if draft_head is not None:
        model = open_with_head(model, draft_head, progress, accepted)
    if model.left_out:
        progress.note(f"left out: {model.left_out}")
    if not each_options[0].draft_layer:
        model.spec = replace(model.spec, draft=None)
    if own_types:
        each_options = [with_own_types(model, each) for each in each_options]
    plan = _Plan(source, model, [with_invariance(model.spec, each) for each in each_options], self_test)
    if own_types:
        progress.note(f"weights: {_own_weights(plan)}; {_alternative(plan)}")
    else:
        _note_weights(plan, progress)
    return plan


def _own_weights(plan: _Plan) -> str:
    """Describe to the user how a build with `own_types` stores the weights."""
    quantisation = plan.model.quantisation
    chosen = f"{plan.options.stored_weights}, {_megabytes(plan, plan.options)}"
    if quantisation is None:
        return chosen
    return f"{chosen}, as most of the source's are {quantisation}"


def _alternative(plan: _Plan) -> str:
    """Describe another type to the user, a smaller one for floats and for blocks that grow to 8 bits."""
    quantisation = plan.model.quantisation
    grows = quantisation is not None and quantisation.bits is not None and plan.options.weights == "q8_0"
    other: WeightType = "q8_0" if quantisation is None else "q4" if grows else "bf16"
    options = replace(plan.options, weights=other, block_types=())
    return f"`--weights {other}` makes {_megabytes(plan, options)}"


def _note_weights(plan: _Plan, progress: BuildProgress) -> None:
    """Tell the user if weights in the source's block type are stored in another type, with both sizes."""
    quantisation, options = plan.model.quantisation, plan.options
    if quantisation is None or quantisation.weights == options.weights:
        return
    chosen = f"{options.weights}, {_megabytes(plan, options)}"
    keeps = "keeps them as they are, in" if quantisation.kept else "makes"
    other = _megabytes(plan, with_own_types(plan.model, options))
    progress.note(
        f"weights: {chosen}; most of the source's are {quantisation.name}, and `--weights {OWN_TYPES}` "
        f"{keeps} {other}"
    )


def _megabytes(plan: _Plan, options: BuildOptions) -> str:
    """Format the total size of the parameter files that a build with the weight types of `options` stores."""
    spec, archives = plan.model.spec, {}
    for program in plan.programs:
        own = replace(program.options, weights=options.weights, block_types=options.block_types)
        layouts = weight_layouts(spec, own, program.target)
        archives[repr(layouts)] = stored_bytes(spec, own, program.target)
    return f"{sum(archives.values()) / 1e6:,.1f} MB"


def _build(plan: _Plan, out: Path, progress: BuildProgress, use_cache: bool) -> Artifact:
    if current := _up_to_date(out, plan.identity, progress):
        progress.note(f"{out} is up to date")
        return current
    tell_dropped(out, {each.target.cpu for each in plan.programs}, progress.note)
    with staging(out) as folder:
        root = user_cache() / BUILD if use_cache else folder / "cache"
        cache = BuildCache(root, progress, temporary=not use_cache)
        cache.sweep()
        made = folder / "artefact"
        made.mkdir()
        _assemble(plan, made, cache, progress)
        replace_output(made, out)
    return Artifact.open(out, for_this_host=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """A program to build: target, options, config, file names, and the cache keys of its weights and VMFB."""

    target: Target
    options: BuildOptions
    config: ModelConfig
    weights_key: str
    program_key: str
    vmfb: str = file_names.VMFB
    parameters: str = file_names.PARAMETERS
    config_file: str = file_names.CONFIG

    @property
    def name(self) -> str:
        return name_of(self.target.device)

    @property
    def kind(self) -> str:
        return kind_of(self.target.device)


class _Plan:
    """A planned build: its programs, GPUs first, and the cache keys of the self-test and the artefact.

    `each_options` has the options for each kind of device, in the order of the programs.
    """

    def __init__(
        self, uri: str, model: ModelSource, each_options: Sequence[BuildOptions], self_test: bool
    ) -> None:
        self.uri = uri
        self.model = model
        code = _code_hashes()
        programs = [
            _program(model, options, target, code)
            for options in each_options
            for target in resolve_targets(options.device)
        ]
        programs.sort(key=lambda each: KINDS.index(each.kind))
        self.programs = _named(programs)
        self.configs = {each.config_file: each.config for each in self.programs}
        self.each_options = tuple(
            replace(of_kind[0].options, device=join_devices(each.target.device for each in of_kind))
            for of_kind in _grouped(programs, lambda each: each.kind).values()
        )
        self.options = self.programs[0].options
        self.use = Use(uri, join_devices(each.target.device for each in programs))
        self.self_test_key = (
            _self_test_key(model, self.options, self.programs[0], code) if self_test else None
        )
        self.identity = content_key(
            [(each.weights_key, each.program_key, each.config) for each in programs],
            *(model.spec, self.each_options, __version__, code, self.self_test_key),
        )


def _program(model: ModelSource, options: BuildOptions, target: Target, code: dict[str, str]) -> _Program:
    options = replace(options, device=target.device)
    weights_code = {name: value for name, value in code.items() if _folder(name) in WEIGHTS_CODE}
    program_code = {name: value for name, value in code.items() if _folder(name) in PROGRAM_CODE}
    layouts = weight_layouts(model.spec, options, target)
    return _Program(
        target=target,
        options=options,
        config=model_config(model.spec, options),
        weights_key=content_key(model.sha256, options.weights, options.block_types, layouts, weights_code),
        # The key excludes the model's name and the number of pages, which the program does not contain: the
        # slab's size is dynamic.
        program_key=content_key(
            replace(model.spec, name=""),
            replace(options, device_block_count=None),
            (target.architecture, target.cpu, sorted(target.features)),
            version("iree-base-compiler"),
            triton_version(target),
            program_code,
        ),
    )


def _self_test_key(model: ModelSource, options: BuildOptions, first: _Program, code: dict[str, str]) -> str:
    """Return the cache key of the self-test, which all programs share.

    Programs differ in the layouts of weights, but not in their values.
    """
    own_code = {name: value for name, value in code.items() if _folder(name) in SELF_TEST_CODE}
    shapes = (options.kv, options.block_seq_stride, options.context_length)
    return content_key(first.weights_key, replace(model.spec, name=""), shapes, own_code)


def _named(programs: list[_Program]) -> tuple[_Program, ...]:
    """Return the programs with their file names; equal parameters, and equal configs, share a file."""
    if len(programs) == 1:
        return tuple(programs)
    of_device, readers = file_names.of_device, _grouped(programs, lambda each: each.weights_key)
    named = [replace(each, vmfb=of_device(each.vmfb, each.name)) for each in programs]
    if len(readers) > 1:
        firsts = {key: each[0].name for key, each in readers.items()}
        named = [
            replace(each, parameters=of_device(each.parameters, firsts[each.weights_key])) for each in named
        ]
    if any(each.config != named[0].config for each in named):
        named = [replace(each, config_file=of_device(each.config_file, each.kind)) for each in named]
    return tuple(named)


def _assemble(plan: _Plan, folder: Path, cache: BuildCache, progress: BuildProgress) -> None:
    """Write the artefact's files to `folder`."""
    tokenizer = plan.model.tokenizer_files()
    weights = {
        name: _cached_weights(plan, readers, cache, progress)
        for name, readers in _grouped(plan.programs, lambda each: each.parameters).items()
    }
    programs = {each.vmfb: _cached_program(plan, each, cache, progress) for each in plan.programs}
    self_tests = _cached_self_tests(plan, cache, progress)
    with progress.stage("write") as stage:
        files = _place(weights, file_names.PARAMETERS, folder) | _place(programs, file_names.VMFB, folder)
        files |= _place(self_tests, file_names.SELF_TEST, folder)
        _write_texts(plan, tokenizer, folder)
        files |= {name: record(folder / name) for name in (*plan.configs, *file_names.TEXTS)}
        compiled = [
            _COMPILE_RECORD.validate_json((entry.directory / COMPILE_RECORD).read_bytes())
            for entry in programs.values()
        ]
        (folder / file_names.MANIFEST).write_bytes(_manifest(plan, compiled, files).to_json())
        stage.say(f"{total_bytes(files) / 1e6:,.1f} MB, programs for {plan.use.device}")


def _grouped(programs: Sequence[_Program], key: Callable[[_Program], str]) -> dict[str, list[_Program]]:
    """Group programs by `key`, keeping their order."""
    groups: dict[str, list[_Program]] = {}
    for each in programs:
        groups.setdefault(key(each), []).append(each)
    return groups


def _place(entries: dict[str, CacheEntry], kept_as: str, folder: Path) -> dict[str, FileRecord]:
    """Place the file `kept_as` of each cache entry in `folder`; return the files' records.

    `entries` maps file names in `folder` to cache entries.
    """
    for name, entry in entries.items():
        entry.place(kept_as, folder / name)
    return {name: entry.files[kept_as] for name, entry in entries.items()}


def _manifest(plan: _Plan, compiled: Sequence[CompileRecord], files: dict[str, FileRecord]) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        identity=plan.identity,
        product_version=__version__,
        versions=_versions(plan.programs[0].target),  # GPUs come first, whose builds need Triton, too
        source=SourceRecord(uri=plan.uri, sha256=plan.model.sha256),
        spec=plan.model.spec,
        all_options=plan.each_options,
        vocab_size=plan.model.spec.vocab_size,
        files=files,
        programs=tuple(map(_program_record, plan.programs, compiled)),
    )


def _program_record(program: _Program, compiled: CompileRecord) -> ProgramRecord:
    return ProgramRecord(
        vmfb=program.vmfb,
        parameters=program.parameters,
        config=program.config_file,
        entries=compiled.entries,
        target=compiled.target,
        compile_flags=compiled.flags,
        kernels=compiled.kernels,
    )


def triton_version(target: Target) -> str | None:
    """Return Triton's version for GPU targets; None for CPUs or if Triton is not installed."""
    try:
        return None if target.is_cpu else version("triton")
    except PackageNotFoundError:
        return None


def _versions(target: Target) -> dict[str, str]:
    """Return the versions of the libraries that made the artefact."""
    versions = {name: version(name) for name in LIBRARIES}
    triton = triton_version(target)
    return versions if triton is None else {**versions, "triton": triton}


def _cached_weights(
    plan: _Plan, readers: Sequence[_Program], cache: BuildCache, progress: BuildProgress
) -> CacheEntry:
    program = readers[0]

    def make(folder: Path) -> None:
        total = stored_bytes(plan.model.spec, program.options, program.target)
        with progress.stage("weights", total) as stage:
            devices = f" for {', '.join(each.name for each in readers)}"
            has_several = len(plan.programs) > 1
            stage.say(f"{total / 1e6:,.0f} MB of {plan.options.weights}{devices if has_several else ''}")
            path = folder / file_names.PARAMETERS
            write_weights(plan.model, program.options, program.target, path, stage.advance)

    return cache.get_or_make("weights", program.weights_key, make, plan.use)


def _cached_program(plan: _Plan, program: _Program, cache: BuildCache, progress: BuildProgress) -> CacheEntry:
    def make(folder: Path) -> None:
        with progress.stage("compile") as stage:
            out = folder / file_names.VMFB
            result = compile_model(plan.model.spec, program.options, out, cache.kernels, stage.say)
        target = result.target
        made = CompileRecord(
            flags=result.flags,
            entries=result.entries,
            kernels=result.kernels,
            target=TargetRecord(
                device=target.device,
                architecture=target.architecture,
                cpu=target.cpu,
                features=tuple(sorted(target.features)),
            ),
        )
        (folder / COMPILE_RECORD).write_bytes(_COMPILE_RECORD.dump_json(made))

    return cache.get_or_make("program", program.program_key, make, plan.use)


def _cached_self_tests(plan: _Plan, cache: BuildCache, progress: BuildProgress) -> dict[str, CacheEntry]:
    """Return {file name: cache entry} of the self-test; empty for builds without a self-test."""
    if plan.self_test_key is None:
        return {}
    program = plan.programs[0]

    def make(folder: Path) -> None:
        with progress.stage("self-test", len(plan.model.spec.layers)) as stage:
            stage.say("results for a few prompts, computed in f32 (`build --no-self-test` leaves it out)")
            made = make_self_test(plan.model, program.options, program.target, stage.advance)
        (folder / file_names.SELF_TEST).write_bytes(made.to_json())

    entry = cache.get_or_make("self-test", plan.self_test_key, make, plan.use)
    return {file_names.SELF_TEST: entry}


def _write_texts(plan: _Plan, tokenizer: TokenizerFiles, folder: Path) -> None:
    for name, config in plan.configs.items():
        _write_json(folder / name, config.to_dict())
    (folder / file_names.TOKENIZER).write_text(tokenizer.tokenizer, encoding="utf-8")
    _write_json(folder / file_names.TOKENIZER_CONFIG, tokenizer.config)
    _write_json(folder / file_names.GENERATION_CONFIG, tokenizer.generation)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _code_hashes() -> dict[str, str]:
    """Return the SHA-256 of every source file that build results depend on, by its path.

    Paths are relative to builder/ or contract/; paths in model/ are relative to the package.
    """
    named = {path.relative_to(_BUILDER).as_posix(): path for path in _code_files(_BUILDER)}
    named |= {path.relative_to(_PACKAGE).as_posix(): path for path in _code_files(_PACKAGE / "model")}
    named |= {name: _PACKAGE / "contract" / name for name in _CONTRACT}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in named.items()}


def _code_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in _CODE_SUFFIXES)


def _folder(name: str) -> str:
    """Return the first component of a path of `_code_hashes`."""
    return name.partition("/")[0]


def _up_to_date(out: Path, identity: str, progress: BuildProgress) -> Artifact | None:
    """Return the artefact in `out` if it has this identity and is intact, otherwise None.

    Reports each damaged file to `progress`.
    """
    try:
        current = Artifact.open(out, for_this_host=False)
    except ArtifactError:
        return None
    manifest = current.manifest
    if manifest is None or manifest.identity != identity or not manifest.files.keys() >= manifest.file_names:
        return None
    with progress.stage("verify", total_bytes(manifest.files), str(out)) as stage:
        wrong = wrong_files(out, manifest.files, stage.advance)
    for name, reason in wrong.items():
        progress.note(f"{out / name}: {reason}; it is written again")
    return None if wrong else current
