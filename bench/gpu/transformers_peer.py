"""The same shapes by torch and transformers: greedy decodes with a static cache, and continuous batching.

    python transformers_peer.py MANIFEST --context 256 --results FILE

Runs with the machine's own Python and imports nothing of this project. Weights are random, in bf16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]

MEASURED_STEPS = 32
UNMEASURED_STEPS = 8  # they compile, and capture the graph
CLIENTS = 64
TOKENS = 128  # in and out, per request of the continuous batching

Emit = Callable[[dict[str, Any]], None]


def main() -> int:
    args = _parse()
    manifest = json.loads(args.manifest.read_text(encoding="utf-8"))
    spec = manifest["spec"]

    def emit(record: dict[str, Any]) -> None:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        line = json.dumps({"part": "transformers", "model": spec["name"], **record, **versions})
        with args.results.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)

    torch.manual_seed(0)
    torch.set_default_device(args.device)
    with torch.no_grad():  # not inference_mode, as the continuous batching uses its own threads
        model = _model(spec)
        for rows in manifest["all_options"][0]["decode_batch_sizes"]:
            emit(static_decode(model, rows, args.context))
            torch.compiler.reset()
        emit(continuous_batching(model))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--context", type=int, required=True, help="tokens, at the end of a decode")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, required=True)
    return parser.parse_args()


def _model(spec: dict[str, Any]) -> Any:
    """Create a Llama of this shape; it uses default rotary frequencies, which take the same time."""
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = transformers.LlamaConfig(
        **{name: spec[name] for name in (*same, "num_key_value_heads", "head_dim", "tie_word_embeddings")},
        max_position_embeddings=min(spec["max_position_embeddings"], 8192),
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def static_decode(model: Any, rows: int, context: int) -> dict[str, Any]:
    """Time a compiled greedy step of `rows` rows (median), with logits and tokens on the device."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=context)
    length = context - UNMEASURED_STEPS - MEASURED_STEPS
    prompt = torch.randint(0, model.config.vocab_size, (rows, length))

    def step(tokens: Any, positions: Any) -> Any:
        found = model(tokens, position_ids=positions, past_key_values=cache, use_cache=True)
        return found.logits[:, -1:].argmax(-1)

    compiled = torch.compile(step, mode="reduce-overhead")
    first = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    tokens = first.logits.argmax(-1)
    times = []
    for position in range(length, length + UNMEASURED_STEPS + MEASURED_STEPS):
        begin = time.perf_counter()
        torch.compiler.cudagraph_mark_step_begin()
        # A copy, as the graph's next replay overwrites its results.
        tokens = compiled(tokens, torch.tensor([[position]])).clone()
        _wait(tokens)
        times.append(time.perf_counter() - begin)
    step_s = statistics.median(times[UNMEASURED_STEPS:])
    return {
        "kind": "static",
        "rows": rows,
        "prompt_tokens": length,
        "output_tokens": MEASURED_STEPS,
        "step_ms": step_s * 1e3,
        "tokens_per_s": rows / step_s,
    }


def continuous_batching(model: Any) -> dict[str, Any]:
    """Return output tokens per second of two requests per client, without HTTP."""
    prompts = torch.randint(0, model.config.vocab_size, (2 * CLIENTS, TOKENS)).tolist()
    generation = transformers.GenerationConfig(max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    at_once = transformers.ContinuousBatchingConfig(max_requests_per_batch=CLIENTS, num_blocks=4 * CLIENTS)
    for asked in (prompts[:CLIENTS], prompts):  # the first warms up
        begin = time.perf_counter()
        answers = model.generate_batch(
            inputs=asked, generation_config=generation, continuous_batching_config=at_once
        )
        duration_s = time.perf_counter() - begin
    tokens = sum(len(answer.generated_tokens) for answer in answers.values())
    if tokens != TOKENS * len(prompts):
        raise RuntimeError(f"there are {tokens} tokens instead of {TOKENS * len(prompts)}")
    return {
        "kind": "generate_batch",
        "rows": CLIENTS,
        "prompt_tokens": TOKENS,
        "output_tokens": TOKENS,
        "tokens": tokens,
        "duration_s": duration_s,
        "tokens_per_s": tokens / duration_s,
    }


def _wait(tokens: Any) -> None:
    """Wait until the tokens are on the host, as a loop that checks for the end of a text must."""
    tokens.cpu()


if __name__ == "__main__":
    sys.exit(main())
