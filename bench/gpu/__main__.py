"""Measures models compiled for a GPU on a machine without a network.

python -m bench.gpu pack DIR           # here: compiles, and packs wheels, sources and programs
python -m bench.gpu run DIR --out OUT  # there: makes the weights and measures
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.gpu.environment import PackError, environment_of, facts_of, make_environment

PACK = """\
Compiles the models for a device, and packs the programs (no weights), this package and these scripts, and the
wheels that they need for another machine's Python. Needs the compiler, Triton for a GPU, and pip's index."""
PACK_EPILOG = """\
examples:
  python -m bench.gpu pack gpu-pack                                # for an H200: cuda:sm_90, about 107 MB
  python -m bench.gpu pack q4-pack --models llama-3.1-8b --weights q4
  python -m bench.gpu pack many-pack --models smollm2-135m --no-one-launch   # separate launches
  python -m bench.gpu pack tiny-pack --models random-tiny --device cpu --no-wheels"""
RUN = """\
Makes a virtual environment of the pack's wheels and the weights of each model (in the temporary folder: 16 GB
for the 8B model; TMPDIR names another), and measures part by part:

  tokens        the tiny models' greedy tokens equal the CPU's
  entries       each entry, one call at a time (sync) and many in flight (queued)
  engine        in process, at each pipeline depth: mixed traffic of up to 64 requests at a time (16 to 512
                in / 64 out; greedy, from the whole vocabulary, with a penalty, logprobs, a JSON schema) in
                each batching mode, and steady decodes at each batch size
  drafts        steady decodes with a draft layer that is right 7 times in 10, in its step or ahead of it
  http          the server over loopback: 64 clients of the engine's process and of one API process, 256
                of one and four, 512 of four; 128 in / 128 out, and 16 to 512 in / 64 out
  transformers  the same shapes by torch and transformers, if this machine's own Python has them

Times of tiny models are left out unless --models names them. OUT gets results.jsonl, a line as soon as a
figure is there; results.md and plots after each part."""
RUN_EPILOG = """\
examples:
  PYTHONPATH=gpu-pack/source python3 -m bench.gpu run gpu-pack --out results
  PYTHONPATH=gpu-pack/source python3 -m bench.gpu run gpu-pack --out results --only entries --seconds 500
  python -m bench.gpu run tiny-pack --out results --here --device cpu --models random-tiny"""
TINY_NAMES = (
    "random-tiny, random-tiny-hybrid, random-tiny-latent, tiny-gemma, tiny-gpt-oss, tiny-experts, "
    "tiny-kv-q8_0"
)
TIMED_NAMES = "smollm2-135m, llama-3.1-8b, gpt-oss-20b, hybrid-0.8b"


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return _pack(args) if args.command == "pack" else _run(args)
    except PackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(dest="command", required=True)
    style = argparse.RawDescriptionHelpFormatter
    pack = commands.add_parser("pack", description=PACK, epilog=PACK_EPILOG, formatter_class=style)
    pack.add_argument("pack", type=Path, metavar="DIR", help="the folder to write; an older pack is replaced")
    pack.add_argument(
        "--device", default="cuda:sm_90", help="as for `shortfin-llm build` (default: %(default)s)"
    )
    pack.add_argument(
        "--weights", help="as for `shortfin-llm build`, of the models that are timed (default: bf16)"
    )
    pack.add_argument(
        "--kv", help="as for `shortfin-llm build`, of the models that are timed (default: bf16)"
    )
    pack.add_argument(
        "--one-launch", action=argparse.BooleanOptionalAction, help="as for `shortfin-llm build`"
    )
    pack.add_argument("--python", default="3.12", help="of the other machine (default: %(default)s)")
    pack.add_argument("--no-wheels", action="store_true", help="for a machine that has the wheels installed")
    run = commands.add_parser("run", description=RUN, epilog=RUN_EPILOG, formatter_class=style)
    run.add_argument("pack", type=Path, metavar="DIR", help="what `pack` has written")
    run.add_argument("--out", type=Path, required=True, metavar="OUT", help="folder for the results")
    run.add_argument("--device", default="cuda", help="as for `shortfin-llm serve` (default: %(default)s)")
    run.add_argument(
        "--only",
        type=_names,
        default=["tokens", "entries", "engine", "http", "transformers"],
        metavar="PART,..",
    )
    run.add_argument(
        "--seconds", type=float, metavar="S", help="end after so long; parts that are left are named"
    )
    run.add_argument(
        "--sample-seconds", type=float, default=0.5, help="of each sample (default: %(default)s)"
    )
    run.add_argument("--here", action="store_true", help="use this Python instead of the pack's wheels")
    run.add_argument("--torch-python", default=sys.executable, help="(default: the one that runs this)")
    for command in (pack, run):
        command.add_argument(
            "--models", type=_names, metavar="NAME,..", help=f"of {TINY_NAMES}, {TIMED_NAMES} (default: all)"
        )
    return made


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _pack(args: argparse.Namespace) -> int:
    from bench.gpu.models import MODELS
    from bench.gpu.pack import pack

    chosen = {"weights": args.weights, "kv": args.kv, "one_launch": args.one_launch}
    models = [MODELS[name].for_device(args.device, **chosen) for name in args.models or MODELS]
    pack(args.pack.resolve(), models, None if args.no_wheels else args.python)
    print(args.pack)
    return 0


def _run(args: argparse.Namespace) -> int:
    if args.here:
        return _measure(args)
    begin = time.monotonic()
    pack = args.pack.resolve()
    with TemporaryDirectory(prefix="gpu-venv-") as folder:
        python = make_environment(pack, Path(folder))
        flags = ["--here", "--out", str(args.out.resolve()), "--device", args.device]
        flags += ["--only", ",".join(args.only), "--sample-seconds", str(args.sample_seconds)]
        flags += ["--torch-python", args.torch_python]
        if args.models:
            flags += ["--models", ",".join(args.models)]
        if args.seconds is not None:
            flags += ["--seconds", str(args.seconds - (time.monotonic() - begin))]
        command = [str(python), "-m", "bench.gpu", "run", str(pack), *flags]
        # `-m` looks into the working directory first, which may be a checkout of another commit.
        return subprocess.run(command, env=environment_of(pack), cwd=folder, check=False).returncode


def _measure(args: argparse.Namespace) -> int:
    from bench.gpu.run import Choice, run

    choice = Choice(
        device=args.device,
        models=args.models or facts_of(args.pack)["models"],
        named=args.models or (),
        parts=args.only,
        sample_seconds=args.sample_seconds,
        seconds=args.seconds,
        python=args.torch_python,
    )
    failed = run(args.pack.resolve(), args.out.resolve(), choice)
    print(args.out / "results.md")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
