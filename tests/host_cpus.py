"""CPUs to take this host for, by Linux's names of their features."""

from __future__ import annotations

from shortfin_apps.llm.contract.host_cpu import HostCpu

V2_FEATURES = frozenset({"fpu", "pni", "ssse3", "sse4_1", "sse4_2", "popcnt"})
V3_FEATURES = V2_FEATURES | {"avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"}
V4_FEATURES = V3_FEATURES | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

V2, V3, V4 = (HostCpu("x86_64", features) for features in (V2_FEATURES, V3_FEATURES, V4_FEATURES))
ARM = HostCpu("arm_64", frozenset({"fp", "asimd"}))
