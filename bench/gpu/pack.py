"""Packs everything needed for a measurement into one folder, on a machine with a network and the compiler.

DIR/pack.json           description: Python, commit, models
DIR/wheels/             imports of the server and the measurement, for the other machine's Python
DIR/source/             this package and these scripts
DIR/models/NAME/        the program, its manifest, and a list of its parameters; for a tiny model, the
                        parameters and the CPU's continuations of its prompts
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from packaging.markers import default_environment
from packaging.requirements import Requirement

from bench.gpu.drafting import predictable
from bench.gpu.engine import generate
from bench.gpu.environment import FACTS, MODELS, SOURCE, WHEELS, PackError
from bench.gpu.models import Model
from bench.gpu.tokens import EXPECTED, MAX_TOKENS, make_prompts
from bench.gpu.weights import LIST, PARAMETER_LIST, Parameter, complete
from shortfin_apps.llm import __version__
from shortfin_apps.llm.artifact import file_names
from shortfin_apps.llm.artifact.artifact import FORMAT_VERSION, Artifact, Manifest, SourceRecord
from shortfin_apps.llm.artifact.program_record import ProgramRecord, TargetRecord
from shortfin_apps.llm.builder.cache import BUILD, BuildCache, user_cache
from shortfin_apps.llm.builder.program.compiler import compile_model
from shortfin_apps.llm.builder.sources.random_tiny import RandomTinySource
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.builder.weights.layout import stored_types
from shortfin_apps.llm.builder.weights.write import write_weights
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.model.config import model_config
from shortfin_apps.llm.model.spec import weight_shapes
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.loading import make_engine

ROOT = Path(__file__).parents[2]
DISTRIBUTION = "shortfin-llm"
# Dependencies used only for compiling, downloading or chatting.
NOT_NEEDED = frozenset({"shortfin", "iree-base-compiler", "pip", "prompt-toolkit"})
# Every glibc up to the one of llguidance's wheel, as pip compares platform names literally.
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in (31, 28, 27, 24, 17, 12, 5)),
    "manylinux2014_x86_64",
]


def pack(out: Path, models: Sequence[Model], python: str | None) -> None:
    """Write the folder, which must be empty or an older pack; without wheels if `python` is None.

    Raises PackError, BuildError.
    """
    if out.exists() and any(out.iterdir()) and not (out / FACTS).exists():
        raise PackError(f"{out} is neither empty nor a pack; name another folder")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    facts = {
        "python": python,
        "commit": _commit(),
        "models": [model.name for model in models],
        "iree": metadata.version("iree-base-compiler"),
    }
    (out / FACTS).write_text(json.dumps(facts) + "\n", encoding="utf-8")
    _copy_source(out / SOURCE)
    for model in models:
        print(f"compiling {model.name} for {model.options.device}", file=sys.stderr)
        folder = out / MODELS / model.name
        pack_model(model, folder)
        if not model.is_timed:
            (folder / EXPECTED).write_text(json.dumps(expected_tokens(model)) + "\n", encoding="utf-8")
    if python is not None:
        download(requirements([f"{DISTRIBUTION}[build,terminal]"], python), python, out / WHEELS)


def pack_model(model: Model, folder: Path) -> None:
    """Compile the model's program into `folder`, with a manifest that lists no files yet.

    A tiny model is packed with its parameters, any other only with a list of them.
    """
    folder.mkdir(parents=True)
    kernels = BuildCache(user_cache() / BUILD).kernels
    compiled = compile_model(model.spec, model.options, folder / file_names.VMFB, kernels)
    target = compiled.target
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        identity="",
        product_version=__version__,
        versions={"iree-base-compiler": metadata.version("iree-base-compiler")},
        source=SourceRecord(uri=f"random:{model.name}", sha256=""),
        spec=model.spec,
        all_options=(model.options,),
        vocab_size=model.spec.vocab_size,
        files={},
        programs=(
            ProgramRecord(
                vmfb=file_names.VMFB,
                parameters=file_names.PARAMETERS,
                config=file_names.CONFIG,
                entries=compiled.entries,
                target=TargetRecord(
                    device=target.device,
                    architecture=target.architecture,
                    cpu=target.cpu,
                    features=tuple(sorted(target.features)),
                ),
                compile_flags=compiled.flags,
                kernels=compiled.kernels,
            ),
        ),
    )
    (folder / file_names.MANIFEST).write_bytes(manifest.to_json())
    config = model_config(model.spec, model.options)
    (folder / file_names.CONFIG).write_text(json.dumps(config.to_dict()), encoding="utf-8")
    if model.is_timed:
        (folder / LIST).write_bytes(PARAMETER_LIST.dump_json(list(parameters(model, target))))
    else:
        source = RandomTinySource(model.spec)
        write_weights(source, model.options, target, folder / file_names.PARAMETERS, lambda _: None)


def parameters(model: Model, target: Target) -> Iterator[Parameter]:
    """Yield the parameters that the model's program reads on the target, with their noise."""
    for weight, shape in weight_shapes(model.spec).items():
        layout = weight_layout(weight, model.spec, model.options, target)
        for name, (stored, dtype) in stored_types(layout, weight, shape).items():
            yield predictable(model.spec, Parameter(name, stored, dtype, features=shape[-1]))


def expected_tokens(model: Model) -> list[list[int]]:
    """Return the greedy tokens of a tiny model on this CPU."""
    with TemporaryDirectory() as scratch, closing(open_device("cpu")) as device:
        packed, whole = Path(scratch, "packed"), Path(scratch, "whole")
        pack_model(model.for_device("cpu"), packed)
        complete(packed, whole)
        artifact = Artifact.open(whole)
        options = EngineSettings(prefix_cache="none", pipeline_depth=0)
        engine = make_engine(
            device, artifact.config, artifact.vmfb, artifact.parameters, frozenset(), options
        )
        return generate(engine, make_prompts(model), MAX_TOKENS)


def requirements(roots: Iterable[str], python: str) -> list[str]:
    """Return installed dependencies of `roots` for another Linux Python, as `name==version`."""
    here = cast(Mapping[str, str], default_environment())
    environment = {**here, "python_version": python, "python_full_version": f"{python}.0"}
    needed: dict[str, frozenset[str]] = {}
    waiting = [Requirement(root) for root in roots]
    while waiting:
        requirement = waiting.pop()
        name, extras = _canonical(requirement.name), frozenset(requirement.extras)
        if name in NOT_NEEDED or (name in needed and extras <= needed[name]):
            continue
        needed[name] = extras | needed.get(name, frozenset())
        for text in metadata.requires(name) or []:
            found = Requirement(text)
            chosen = [{**environment, "extra": extra} for extra in ("", *extras)]
            if found.marker is None or any(found.marker.evaluate(each) for each in chosen):
                waiting.append(found)
    installed = needed.keys() - {_canonical(Requirement(root).name) for root in roots}
    return [f"{name}=={metadata.version(name)}" for name in sorted(installed)]


def download(pins: Sequence[str], python: str, folder: Path) -> None:
    """Download wheels of exactly these versions for CPython on x86-64. Raises PackError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    done = subprocess.run(
        [*command, "--dest", str(folder), *pins], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise PackError(f"pip could not download the wheels: {done.stderr.strip()}")


def _copy_source(out: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.svg", "*.md", "peers")
    for name in ("bench", "shortfin_apps"):
        shutil.copytree(ROOT / name, out / name, ignore=ignored)


def _commit() -> str:
    """Return the checkout's commit, with a + if files were changed; empty outside of a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=7"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
