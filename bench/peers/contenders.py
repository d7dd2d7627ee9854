"""The servers that can be compared, by name, and the weights with which each is measured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from bench.peers.cache import Cache, SetUpError
from bench.peers.campaign import Contender
from bench.peers.in_process_peer import InProcessPeer
from bench.peers.kinds import KINDS
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.onnxruntime_genai import ORT
from bench.peers.openvino_genai import OPENVINO
from bench.peers.ours import Ours
from bench.peers.subject import Subject
from bench.peers.vllm_cpu import VllmCpu

DEFAULT_MODE, ZEN = "ours-default", "vllm-zen"
DEFAULT_SERVERS = ("ours", "llama", "vllm", "openvino", "ort")
SERVERS = ("ours", DEFAULT_MODE, "llama", "vllm", ZEN, "openvino", "ort")


def chosen_contenders(args: argparse.Namespace, weights: str) -> list[Contender]:
    """Create the servers that support these weights. Raises SetUpError for an unknown name, or if none do."""
    subject = Subject(args.model, args.device)
    if unknown := [name for name in args.servers if name not in SERVERS]:
        raise SetUpError(f"there is no server {unknown[0]!r}; choose from {', '.join(SERVERS)}")
    names = [name for name in args.servers if is_measured(name, weights, subject)]
    if not names:
        raise SetUpError(
            f"{', '.join(args.servers)}: not measured on {subject.name} with {weights} weights, as only ours "
            "and llama.cpp are on all models and kinds of CPU; leave it out"
        )
    makers = _makers(args, subject)
    return [makers[name]() for name in names]


def is_measured(name: str, weights: str, subject: Subject) -> bool:
    """Whether the server is compared with these weights; all peers but llama.cpp only on SmolLM2."""
    kind = KINDS[weights]
    supported = {
        "vllm": kind.has_vllm,
        ZEN: kind.has_vllm,
        "openvino": kind.openvino is not None,
        "ort": kind.ort is not None,
    }
    return name not in supported or (supported[name] and subject == Subject())


def _makers(args: argparse.Namespace, subject: Subject) -> dict[str, Callable[[], Contender]]:
    cache = Cache(args.cache, lambda line: print(line, file=sys.stderr, flush=True))
    threads, python = args.threads, args.vllm_python
    default_mode = [*args.ours_arg, "--batch-mode=default"]
    return {
        "ours": lambda: Ours(cache, threads, subject, args.artefact, args.ours_arg),
        DEFAULT_MODE: lambda: Ours(cache, threads, subject, args.artefact, default_mode, DEFAULT_MODE),
        "llama": lambda: LlamaCpp(cache, threads, args.jobs, subject),
        "vllm": lambda: VllmCpu(cache, threads, python),
        ZEN: lambda: VllmCpu(cache, threads, python, has_zentorch=True),
        "openvino": lambda: InProcessPeer(cache, threads, python, OPENVINO),
        "ort": lambda: InProcessPeer(cache, threads, python, ORT),
    }
