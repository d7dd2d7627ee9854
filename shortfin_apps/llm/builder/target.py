"""Compilation target: a CPU or GPU, its compiler flags, and the CPU features that select kernels."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cache

from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.gpu_code.chips import CHIPS, WITHOUT_COMPILER, Fp8Type, nearest
from shortfin_apps.llm.contract.host_cpu import permit_amx
from shortfin_apps.llm.contract.host_gpu import amd_chip, sm_number
from shortfin_apps.llm.contract.iree_release import HOW_TO_INSTALL_NEWEST, OF_SHORTFIN, compiler_release

# Our name of the baseline aarch64 CPU, on any host; LLVM names a baseline CPU only for x86-64 (`x86-64`).
_AARCH64 = "aarch64"
_PROBE = "func.func @probe(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }"
# None is this host's architecture. It comes first, because the CPU names `host` and `generic` refer to it.
_TRIPLES = (None, "aarch64-unknown-linux-gnu", "x86_64-unknown-linux-gnu")
# NVIDIA chips (sm_N) that IREE 3.13 can compile for. PTX compiled for one of them runs on all newer chips.
_CUDA_CHIPS = (80, 86, 87, 89, 120)
_NVIDIA_FP8 = 89  # first chip with fp8 (sm_89)
_TARGET = re.compile(r'#hal\.executable\.target<"llvm-cpu", "([^"]*)", \{(.*?)\}>', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Target:
    """A resolved compilation target.

    `device` is the value of `--device`. For CPUs, `architecture`, `cpu` and `features` (LLVM's names of
    enabled features) hold the resolved values. For GPUs, `cpu` is the chip, `architecture` is "amdgpu" or
    "nvptx", and `features` is empty.
    """

    device: str
    flags: tuple[str, ...]
    architecture: str
    cpu: str
    features: frozenset[str]

    @property
    def is_cpu(self) -> bool:
        """Whether the target is a CPU. Only CPUs can run the hand-written vector kernels."""
        return self.device.split(":")[0] == "cpu"

    @property
    def has_bf16_dot(self) -> bool:
        return self.is_cpu and {"avx512bf16", "avx512f"} <= self.features

    @property
    def has_amx(self) -> bool:
        """Whether the CPU has Intel AMX with bf16 tiles."""
        return self.is_cpu and {"amx-tile", "amx-bf16", "avx512bf16", "avx512f"} <= self.features

    @property
    def has_amx_fp16(self) -> bool:
        """Whether the CPU has Intel AMX with f16 tiles, besides bf16 tiles."""
        return self.has_amx and "amx-fp16" in self.features

    @property
    def has_amx_int8(self) -> bool:
        """Whether the CPU has Intel AMX with int8 tiles, besides bf16 tiles."""
        return self.has_amx and "amx-int8" in self.features

    @property
    def has_int8_dot(self) -> bool:
        """Whether the CPU has int8 dot products in 512-bit vectors (AVX-512 VNNI)."""
        return self.is_cpu and {"avx512vnni", "avx512f"} <= self.features

    @property
    def has_block_dot(self) -> bool:
        """Whether the CPU has byte dot products at its full vector width: AVX-512 VNNI, AVX-VNNI or SDOT."""
        has_avx_vnni = self._has_narrow_integers and "avxvnni" in self.features
        return self.has_int8_dot or has_avx_vnni or self.has_neon_dot

    @property
    def has_neon_dot(self) -> bool:
        """Whether the CPU has int8 dot products in NEON vectors (SDOT)."""
        return self.is_cpu and {"neon", "dotprod"} <= self.features

    @property
    def has_smmla(self) -> bool:
        """Whether the CPU has SDOT and int8 products of 2 x 8 by 8 x 2 matrices in NEON vectors (I8MM)."""
        return self.has_neon_dot and "i8mm" in self.features

    @property
    def has_neon_bf16_dot(self) -> bool:
        """Whether the CPU has dot products of bf16 pairs in NEON vectors (BFDOT)."""
        return self.is_cpu and {"neon", "bf16"} <= self.features

    @property
    def multiplies_blocks(self) -> bool:
        """Whether quantised blocks are multiplied as integers: with byte dot products, AVX-512 or AVX2."""
        return self.has_block_dot or self._has_wide_integers or self._has_narrow_integers

    @property
    def _has_wide_integers(self) -> bool:
        return self.is_cpu and {"avx512bw", "avx512f"} <= self.features

    @property
    def _has_narrow_integers(self) -> bool:
        return self.is_cpu and {"avx2", "fma", "f16c"} <= self.features and not self.has_wide_vectors

    @property
    def fp8(self) -> Fp8Type | None:
        """The 8-bit float type of the GPU's matrix instructions; None without such instructions."""
        if self.architecture == "nvptx":
            return "f8E4M3FN" if sm_number(self.cpu) >= _NVIDIA_FP8 else None
        return None if self.is_cpu else CHIPS[self.cpu].fp8

    @property
    def has_wide_vectors(self) -> bool:
        """Whether the CPU has 32 vector registers of 16 f32 each (AVX-512)."""
        return "avx512f" in self.features


def resolve_target(device: str) -> Target:
    """Resolve the value of `--device`. Raises BuildError if the compiler does not know the device."""
    kind, _, chip = device.partition(":")
    match kind, chip:
        case "cpu", _:
            return _cpu_target(device, chip or "host")
        case "hip", _:
            chip = chip or amd_chip()
            if chip not in CHIPS:
                raise BuildError(_unknown_chip(chip))
            return Target(f"hip:{chip}", _hip_flags(chip), "amdgpu", chip, frozenset())
        case "cuda", str(chip) if re.fullmatch(r"sm_\d+a?", chip):
            return Target(device, _cuda_flags(chip), "nvptx", chip, frozenset())
    raise BuildError(
        f"unknown device {device!r}; give cpu, cpu:<LLVM CPU name>, hip (this machine's AMD GPU), "
        "hip:<chip> (as in hip:gfx942), or cuda:<chip> (as in cuda:sm_90)"
    )


def _unknown_chip(chip: str) -> str:
    known = ", ".join(CHIPS)
    if chip in WITHOUT_COMPILER:
        return f"IREE's compiler does not know {chip} yet; the AMD chips to build for are {known}"
    close = nearest(chip)
    hint = "." if close is None else f": do you mean hip:{close}?"
    return (
        f"unknown AMD chip {chip!r}{hint} The chips to build for are {known}; `rocminfo` on the machine with "
        "the GPU prints its name"
    )


def _hip_flags(chip: str) -> tuple[str, ...]:
    flag = "--iree-hip-target" if compiler_release() == OF_SHORTFIN else "--iree-rocm-target"
    return ("--iree-hal-target-device=hip", f"{flag}={chip}")


def _cuda_flags(chip: str) -> tuple[str, ...]:
    """Return the CUDA flags. Raises BuildError if the compiler has no target that runs on `chip`."""
    if compiler_release() == OF_SHORTFIN:
        raise BuildError(
            f"{chip} needs a newer compiler than IREE {OF_SHORTFIN}'s, which cannot compile attention for "
            f"NVIDIA GPUs; {HOW_TO_INSTALL_NEWEST}, and build with that one"
        )
    number = sm_number(chip)
    runnable = [known for known in _CUDA_CHIPS if known <= number]
    if not runnable:
        raise BuildError(f"{chip} is too old; NVIDIA GPUs are supported from sm_{_CUDA_CHIPS[0]} on")
    return (
        "--iree-hal-target-device=cuda",
        f"--iree-cuda-target=sm_{runnable[-1]}",
        # Constant evaluation is off: the compiler would evaluate constant tensors on the host, and fails to.
        "--iree-opt-const-eval=false",
    )


def _enabled(features: str) -> set[str]:
    """Return the features that LLVM's list "+a,-b" enables; if it has a name twice, the last one counts.

    IREE 3.13 lists those of the CPU's model, then what the host has of them: a virtual machine may have less.
    """
    states = {name[1:]: name.startswith("+") for name in features.split(",") if name}
    return {name for name, is_enabled in states.items() if is_enabled}


def _with_implied(features: set[str]) -> frozenset[str]:
    """Add the implied features that select kernels.

    For some CPUs, such as x86-64-v4, LLVM lists only features that no other listed feature implies.
    """
    if any(name.startswith("avx512") for name in features):
        features = features | {"avx512f"}
    if not features.isdisjoint({"avx512f", "avxvnni"}):
        features = features | {"avx2"}
    return frozenset(features)


@cache
def _cpu_target(device: str, cpu: str) -> Target:
    name, triples = ("generic", _TRIPLES[1:2]) if cpu == _AARCH64 else (cpu, _TRIPLES)
    for triple in triples:
        if target := _probe_cpu(device, name, triple):
            return target
    raise BuildError(
        f"the compiler knows no CPU {cpu!r} for x86-64 or aarch64; "
        "give LLVM's name of a CPU, as in cpu:znver4 or cpu:neoverse-v1, or cpu for this machine's"
    )


def _probe_cpu(device: str, cpu: str, triple: str | None) -> Target | None:
    """Ask the compiler for the features of `cpu`; return None if the compiler does not know the CPU.

    `triple` None: the host's architecture.
    """
    from iree.compiler.tools.binaries import find_tool  # late: this module also loads without it

    flags = (
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu",
        *([f"--iree-llvmcpu-target-triple={triple}"] if triple else []),
        f"--iree-llvmcpu-target-cpu={cpu}",
    )
    probe = subprocess.run(
        [find_tool("iree-compile"), "-", "--compile-to=flow", *flags],
        input=_PROBE,
        capture_output=True,
        text=True,
        check=False,
    )
    found = _TARGET.search(probe.stdout)
    # For an unknown aarch64 CPU the compiler only warns and falls back to a generic one.
    if probe.returncode or not found or "Unknown CPU" in probe.stderr:
        return None
    attributes = dict(re.findall(r'(\w+) = "([^"]*)"', found[2]))
    features = _with_implied(_enabled(attributes.get("cpu_features", "")))
    if cpu == "host" and not permit_amx():
        features = frozenset(name for name in features if not name.startswith("amx"))
    return Target(device, flags, found[1].removeprefix("embedded-elf-"), attributes.get("cpu", ""), features)
