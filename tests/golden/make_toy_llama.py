"""Exports upstream's toy Llama with upstream's exporter, and records its answers in torch.

    pip install torch==2.13.0 amdsharktank==3.9.0 iree-turbine==3.9.0 'wave-lang==3.9.*' \\
        'iree-base-compiler==3.9.*' 'iree-base-runtime==3.9.*'
    python tests/golden/make_toy_llama.py

In an environment of its own, with Python 3.11; it takes two minutes and makes the same files each time.
Written to toy_llama/ beside this file:

  NAME.mlir.xz  the program that each of VARIANTS exports
  golden.json   each program's checksum and the config that the exporter writes beside it; the seed, the
                shapes and the checksum of the weights, from which tests/compat/toy_llama.py makes them again;
                greedy answers of the model in torch, in f16 and one prompt at a time, with the gap between
                the two best logits of each step, so that a test can tell a wrong answer from a near tie
"""

from __future__ import annotations

import hashlib
import json
import lzma
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FOLDER = Path(__file__).with_name("toy_llama")
SEED = 12345  # upstream's default
STRIDE = 16
PAGES = 64
PACKAGES = ("amdsharktank", "iree-turbine", "torch", "iree-base-compiler")
VARIANTS = {
    "plain": [],
    "position": ["--has-prefill-position"],
    "extend": ["--use-extend-attention"],
    "pipeline": ["--has-prefill-position", "--pipeline-parallelism-size=2"],
}
FLAGS = [
    "--bs-prefill=4",
    "--bs-decode=4",
    f"--block-seq-stride={STRIDE}",
    f"--device-block-count={PAGES}",
    "--activation-dtype=float16",
    "--attention-dtype=float16",
    "--kv-cache-dtype=float16",
]
# The first is upstream's own golden. The others take two to six pages, and their answers stay clear of near
# ties, at which f16 on another CPU could turn: the two best logits are more than 0.28 apart.
PROMPTS = [[0]] + [
    [factor * i % 256 for i in range(1, length + 1)]
    for length, factor in ((17, 37), (32, 1), (50, 3), (90, 37))
]
COUNTS = [15, 12, 12, 12, 12]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    record: dict[str, Any] = {"made_with": {name: version(name) for name in PACKAGES}, "seed": SEED}
    with TemporaryDirectory() as folder:
        irpa = Path(folder, "toy.irpa")
        run("amdsharktank.models.llama.toy_llama", f"--seed={SEED}", f"--output={irpa}")
        record["programs"] = {name: export(irpa, name, flags) for name, flags in VARIANTS.items()}
    theta, config = generate()
    record["weights"] = describe(theta)
    record["cases"] = [
        answer(theta, config, prompt, count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)
    ]
    (FOLDER / "golden.json").write_text(json.dumps(record) + "\n")


def run(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)


def export(irpa: Path, name: str, flags: list[str]) -> dict[str, Any]:
    mlir, config = irpa.with_name(f"{name}.mlir"), irpa.with_name(f"{name}.json")
    outputs = [f"--output-mlir={mlir}", f"--output-config={config}"]
    run("amdsharktank.examples.export_paged_llm_v1", f"--irpa-file={irpa}", *FLAGS, *flags, *outputs)
    text = mlir.read_bytes()
    (FOLDER / f"{name}.mlir.xz").write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
    return {
        "flags": [*FLAGS, *flags],
        "sha256": hashlib.sha256(text).hexdigest(),
        "config": json.loads(config.read_text()),
    }


def generate() -> tuple[Any, Any]:
    from amdsharktank.models.llama.toy_llama import generate  # type: ignore[import-not-found]

    made: tuple[Any, Any] = generate(SEED)
    return made


def describe(theta: Any) -> dict[str, Any]:
    """Shapes and types in the order in which torch's generator made the values."""
    arrays = {name: tensor.as_torch().numpy() for name, tensor in theta.flatten().items()}
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays.values()))
    tensors = {name: [array.dtype.name, *array.shape] for name, array in arrays.items()}
    return {"tensors": tensors, "sha256": digest.hexdigest()}


def answer(theta: Any, config: Any, prompt: list[int], count: int) -> dict[str, Any]:
    from amdsharktank.utils import llm_utils  # type: ignore[import-not-found]

    gaps = []

    class Decoder(llm_utils.LlmDecoder):  # type: ignore[misc]
        def _greedy_select(self, logits: Any, indices: Any, positions: list[int]) -> Any:
            second, best = sorted(logits[0][positions[0]].tolist())[-2:]
            gaps.append(round(best - second, 4))
            return super()._greedy_select(logits, indices, positions)

    model = llm_utils.LlmInstance(
        llm_utils.TorchInstance(theta=theta, config=config),
        block_seq_stride=STRIDE,
        page_sizes=llm_utils.llama_config_page_sizes(config),
        block_count=PAGES,
        logits_normalization="none",
        decode_topk_logits=None,
    )
    (tokens,) = Decoder(model.make_runner()).greedy_decode([prompt], count)
    return {"prompt_ids": prompt, "token_ids": [int(token) for token in tokens], "gaps": gaps}


if __name__ == "__main__":
    main()
