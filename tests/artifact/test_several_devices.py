"""An artefact for GPUs and CPUs: the program opened on each, and what is refused. The compiler is faked."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.artifact import file_names
from shortfin_apps.llm.artifact.artifact import Artifact, fitting_host
from shortfin_apps.llm.artifact.file_record import wrong_files
from shortfin_apps.llm.artifact.program_record import Host, ProgramRecord, TargetRecord, choose_program
from shortfin_apps.llm.artifact.verification import verifying
from shortfin_apps.llm.builder import builder
from shortfin_apps.llm.builder.builder import build
from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.host_cpu import HostCpu
from shortfin_apps.llm.contract.host_gpu import HostGpu, sm_number
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.tools.verify.run import verify
from tests.builder.fake_compiler import FakeCompiler
from tests.host_cpus import V2, V3, V4

DEVICE = "hip:gfx1100,gfx942,cpu:x86-64-v3,x86-64-v4"
MISSING = ("model.gfx1100.irpa", "model.gfx1100.vmfb", "model.gfx942.vmfb")  # in a copy for CPUs
CHIPS = ("gfx942", "gfx1100", "gfx1201")
SMS = ("sm_80", "sm_90", "sm_90a", "sm_100", "sm_120")
FEATURES = {"x86-64": (), "x86-64-v3": ("avx2",), "x86-64-v4": ("avx2", "avx512f")}
CPUS = {V2: "x86-64", V3: "x86-64-v3", V4: "x86-64-v4"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("several"), DEVICE)


def built(scratch: Path, device: str) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHORTFIN_LLM_CACHE", str(scratch / "cache"))
        patch.setattr(builder, "compile_model", FakeCompiler().compile_model)
        options = BuildOptions.for_devices(device)
        build("random:tiny", scratch / "a", options, QuietProgress(), self_test=False)
    return scratch / "a"


def at_hand(*hosts: Host) -> Callable[[str], list[Host]]:
    return lambda kind: [host for host in hosts if host.kind == kind]


def programs(*devices: str) -> list[ProgramRecord]:
    made = []
    for device in devices:
        name = device.partition(":")[2]
        target = TargetRecord(device=device, architecture="x86_64", cpu=name, features=FEATURES.get(name, ()))
        made.append(
            ProgramRecord(
                vmfb=f"model.{name}.vmfb",
                parameters="model.irpa",
                config="config.json",
                entries=(),
                target=target,
                compile_flags=(),
                kernels=(),
            )
        )
    return made


hosts = st.one_of(
    st.sampled_from([V2, V3, V4]),
    st.builds(HostGpu, st.just("hip"), st.sampled_from(CHIPS)),
    st.builds(HostGpu, st.just("cuda"), st.sampled_from([sm for sm in SMS if sm[-1] != "a"])),
)
chosen_devices = st.lists(
    st.sampled_from(
        [*(f"hip:{c}" for c in CHIPS), *(f"cuda:{s}" for s in SMS), *(f"cpu:{c}" for c in FEATURES)]
    ),
    unique=True,
)


@given(host=hosts, devices=chosen_devices)
def test_a_device_gets_a_program_that_it_runs_if_there_is_one(host: Host, devices: list[str]) -> None:
    found = choose_program(programs(*devices), host)
    if isinstance(host, HostCpu):
        runs = [f"cpu:{name}" for name in list(FEATURES)[: 1 + list(CPUS.values()).index(CPUS[host])]]
    elif host.kind == "hip":
        runs = [f"hip:{host.chip}"]
    else:
        assert host.chip is not None
        older = [sm for sm in SMS if sm[-1] != "a" and sm_number(sm) <= sm_number(host.chip)]
        runs = [f"cuda:{sm}" for sm in (*older, f"{host.chip}a")]
    usable = set(runs) & set(devices)
    assert (found is not None) == bool(usable)
    if found is not None:
        assert found.target.device in usable
        if host.kind == "cuda":
            assert sm_number(found.target.cpu) == max(sm_number(each.partition(":")[2]) for each in usable)


@pytest.mark.parametrize(
    ("host", "program", "config", "sizes"),
    [
        (HostGpu("hip", "gfx942"), "gfx942", "config.hip.json", 256),
        (HostGpu("hip", "gfx1100", 1), "gfx1100", "config.hip.json", 256),
        (V3, "x86-64-v3", "config.cpu.json", 32),
        (V4, "x86-64-v4", "config.cpu.json", 32),
        (HostGpu("hip", None), "gfx1100", "config.hip.json", 256),  # a driver that does not tell the chip
    ],
)
def test_each_device_opens_its_program_and_config(
    folder: Path, host: Host, program: str, config: str, sizes: int
) -> None:
    artifact = Artifact.open(folder, host=host)
    assert artifact.manifest is not None
    assert artifact.vmfb.name == f"model.{program}.vmfb"
    assert artifact.vmfb.read_text() == f"program for {program}"
    assert artifact.config_file.name == config
    assert (
        max(artifact.config.decode_batch_sizes) == max(artifact.manifest.options.decode_batch_sizes) == sizes
    )
    assert artifact.manifest.options.device == artifact.manifest.program.target.device
    assert artifact.manifest.device == "hip:gfx1100,gfx942,cpu:x86-64-v4,x86-64-v3"


def test_the_first_device_with_a_program_is_taken_gpus_first(folder: Path) -> None:
    old, new = HostGpu("hip", "gfx1036"), HostGpu("hip", "gfx1100", 1)
    assert fitting_host(folder, at_hand(V3, old, new)) == new
    assert fitting_host(folder, at_hand(V3, HostGpu("cuda", "sm_90"))) == V3


def test_what_is_passed_over_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert fitting_host(folder, at_hand(V3, HostGpu("hip", "gfx1201"))) == V3
    assert f"{folder} has no program for this machine's hip:gfx1201" in caplog.text


def test_devices_of_other_kinds_are_not_asked_for(tmp_path: Path) -> None:
    """Asking for GPUs loads their driver."""
    asked: list[str] = []

    def ask(kind: str) -> list[Host]:
        asked.append(kind)
        return [V3]

    fitting_host(built(tmp_path, "cpu:x86-64-v3"), ask)
    assert asked == ["cpu"]


@pytest.mark.parametrize(
    ("device", "host", "says", "command"),
    [
        (
            "hip:gfx942,gfx1100",
            HostGpu("hip", "gfx1201"),
            "built for gfx1100, gfx942, and this machine has gfx1201",
            "--device hip:gfx1100,gfx942,gfx1201 --batch-invariant`",
        ),
        (
            "hip:gfx942",
            HostGpu("hip", "gfx1201"),
            "built for gfx942, and",
            "--device hip:gfx1201 --batch-invariant`",
        ),
        ("hip:gfx942", V3, "built for gfx942, not for a CPU", "--weights bf16`"),
        (
            "hip:gfx942,gfx950",
            V3,
            "built for gfx942, gfx950, not for a CPU",
            "--device hip:gfx942,gfx950,cpu --batch-invariant`",
        ),
        ("cpu:x86-64-v3", HostGpu("hip", "gfx942"), "built for x86-64-v3", "--device hip:gfx942`"),
        (
            "hip:gfx942",
            HostGpu("hip", "gfx1036"),
            "this machine has gfx1036",
            "--weights bf16`",
        ),  # for its CPU
        (
            "hip:gfx942,cpu",
            HostGpu("cuda", None),
            "this machine has cuda",
            "--device hip:gfx942,cpu --batch-invariant`",
        ),
        (
            DEVICE,
            V2,
            "x86-64-v3 needs avx2",
            "--device hip:gfx1100,gfx942,cpu:x86-64-v4,x86-64-v3,host --batch-invariant`",
        ),
    ],
)
def test_where_nothing_fits_it_names_what_is_there_and_what_to_build(
    tmp_path: Path, device: str, host: Host, says: str, command: str
) -> None:
    folder = built(tmp_path, device)
    for opened in (lambda: Artifact.open(folder, host=host), lambda: fitting_host(folder, at_hand(host))):
        with pytest.raises(ArtifactError) as refused:
            opened()
        if says in str(refused.value):
            assert command in str(refused.value)
        else:  # no device of a kind that the artefact is for
            assert "this machine has nothing of that (`--device " in str(refused.value)
    with pytest.raises(ArtifactError) as refused:
        Artifact.open(folder, host=host)
    assert says in str(refused.value)


def test_damage_to_any_program_is_found_by_verify_and_to_its_own_by_the_server(folder: Path) -> None:
    """`verify` reads all files, a server those that it uses."""
    names = [path.name for path in folder.iterdir() if path.suffix in (".vmfb", ".irpa")]
    assert len(names) >= 6
    for name in names:
        path = folder / name
        whole = path.read_bytes()
        path.chmod(0o644)
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        assert verify(folder).wrong_files.keys() == {name}
        used = {
            host.chip
            for host in (HostGpu("hip", "gfx942"), HostGpu("hip", "gfx1100"))
            if not _is_right(Artifact.open(folder, host=host))
        }
        readers = {"gfx942", "gfx1100"} if name == "model.gfx1100.irpa" else {name.split(".")[1]} & set(CHIPS)
        assert used == readers
        path.write_bytes(whole)
    manifest = Artifact.open(folder, for_this_host=False).manifest
    assert manifest is not None
    assert not wrong_files(folder, manifest.files)


def _is_right(artifact: Artifact) -> bool:
    try:
        with verifying(artifact, "hash") as confirm:
            confirm()
    except ArtifactError:
        return False
    return True


def test_an_edited_config_is_that_of_its_kind_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = built(tmp_path, DEVICE)
    path = folder / file_names.of_device(file_names.CONFIG, "hip")
    path.write_text(path.read_text().replace('"max_seq_len": 1024', '"max_seq_len": 512'))
    assert Artifact.open(folder, host=HostGpu("hip", "gfx942")).config.max_seq_len == 512
    assert Artifact.open(folder, host=V3).config.max_seq_len == 1024
    assert _is_right(Artifact.open(folder, host=V3))
    assert "edited" not in caplog.text
    assert _is_right(Artifact.open(folder, host=HostGpu("hip", "gfx942")))
    assert "config.hip.json has" in caplog.text


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy for CPUs: without the files of GPUs, which come first."""
    return Path(shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("*gfx*", "*hip*")))


def test_of_a_copy_the_first_program_that_is_there_is_opened(copy: Path) -> None:
    artifact = Artifact.open(copy, for_this_host=False)
    assert (artifact.vmfb.name, artifact.config_file.name) == ("model.x86-64-v4.vmfb", "config.cpu.json")
    assert artifact.missing_files == ("config.hip.json", *MISSING)
    for each in copy.glob("*.vmfb"):
        each.unlink()
    with pytest.raises(ArtifactError, match=r"model\.gfx1100\.vmfb: no such file"):
        Artifact.open(copy, for_this_host=False)


def test_a_copy_is_verified_without_the_programs_that_it_lacks(copy: Path) -> None:
    path = copy / file_names.TOKENIZER
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().swapcase())  # of the same size
    wrong = dict.fromkeys(("config.hip.json", *MISSING), "is missing")
    wrong[path.name] = "has another content (its SHA-256 differs)"
    assert verify(copy).wrong_files == wrong
