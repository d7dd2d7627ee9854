"""Compute a self-test with the reference (the forward pass in numpy).

One layer's weights are in memory at a time. No device is needed, so artefacts for other machines have
self-tests too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from shortfin_apps.llm.builder.self_test.stored_weights import StoredWeights
from shortfin_apps.llm.builder.sources.base import ModelSource
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.contract.errors import BuildError, is_library_error
from shortfin_apps.llm.contract.self_test_file import (
    FORMAT_VERSION,
    NUM_BEST,
    ExpectedLogits,
    PageSums,
    SelfTestFile,
    TestLayout,
    TestPrompt,
)
from shortfin_apps.llm.model.block import CachedTokens, Carried
from shortfin_apps.llm.model.config import context_length, within
from shortfin_apps.llm.model.kv_layout import KVType
from shortfin_apps.llm.model.layer_inputs import NORM, PROJECTION
from shortfin_apps.llm.model.reference.draft import hidden_before, run_draft_layer
from shortfin_apps.llm.model.reference.forward import begin, normed, run_layer
from shortfin_apps.llm.model.reference.pointwise import capped
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec, WeightType

F32 = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]

SEED = 2011
NUM_SAMPLED = 64
# Real texts: models are not trained on random tokens, on which some weight types of few bits have large
# errors.
TEXTS = (
    "The quick brown fox jumps over the lazy dog. Once upon a time, in a small village by the sea, there "
    "lived an old clockmaker who repaired everything that people brought to him: watches, toys and radios. ",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / "
    "len(values)\n\n\nprint(mean([1, 2, 3, 4, 5]))  # prints 3.0, the sum of five numbers divided by five\n",
)
# Tolerances of logits against the reference, in standard deviations (`SelfTestFile`).
#
# The reference uses the weights as stored and, for an artefact with a q8_0 cache, K and V in 8 bits. So only
# the rounding of activations and the order of sums differ. For SmolLM2-135M, the largest errors over all
# entries on CPUs with AVX-512 and AVX2 were 0.055 in bf16, 0.16 in q8_0, 0.26 in q4, 0.87 in int8 for random
# tokens and 0.41 for text, and less than 1e-4 in f32 (docs/self_test.md). Unrelated logits are off by 1.4.
TOLERANCES: dict[WeightType, float] = {
    "f32": 0.002,
    "f16": 0.03,
    "bf16": 0.15,
    "q8_0": 0.6,
    "q4": 0.6,
    "int8": 1.0,
    "fp8": 1.0,
}
# Tolerances of the same unit for KV caches in a narrower type than the activations.
KV_TOLERANCES: dict[KVType, float] = {"f32": 0.0, "f16": 0.03, "bf16": 0.15, "q8_0": 0.15}
ROUTED_FACTOR = 2.0  # for models with experts: rounding may change the chosen expert
MAX_TOLERANCE = 1.0


def make_self_test(
    source: ModelSource, options: BuildOptions, target: Target, on_progress: Callable[[int], None]
) -> SelfTestFile:
    """Compute the self-test of a build of `source`; call `on_progress` after each layer."""
    spec = _built_spec(source.spec, options)
    layout = TestLayout.of(options.block_seq_stride, spec.max_position_embeddings)
    rng = np.random.default_rng(SEED)
    prompts = _prompts(source, layout.length)
    sample_ids = np.sort(rng.permutation(spec.vocab_size)[:NUM_SAMPLED])
    weights = StoredWeights(source, options, target)
    begun = [_begin(spec, weights, tokens) for tokens in prompts]
    streams = [x for x, _ in begun]
    pages: list[list[PageSums]] = [[] for _ in prompts]
    read: list[dict[int, F32]] = [{} for _ in prompts]  # by the draft layer
    for layer in range(len(spec.layers)):
        block = weights.block(layer)
        for index, x in enumerate(streams):
            streams[index], kept = run_layer(
                spec, layer, block, x, begun[index][1], has_quantised_cache=options.kv == "q8_0"
            )
            pages[index] += _page_sums(layer, kept, layout)
            if spec.draft is not None and layer + 1 in spec.draft.depths:
                read[index][layer + 1] = streams[index]
        on_progress(1)
    norm = weights.whole("output_norm.weight")
    hidden = [normed(spec, x, norm) for x in streams]
    logits = _logits(spec, weights, spec.head_weight, [each[list(layout.checked)] for each in hidden])
    drafts = _drafts(spec, weights, options, layout, list(zip(prompts, read, hidden, strict=True)))
    return SelfTestFile(
        format_version=FORMAT_VERSION,
        stride=options.block_seq_stride,
        pools=spec.pools,
        tolerance=tolerance_of(spec, options),
        sample_ids=tuple(sample_ids.tolist()),
        prompts=tuple(
            TestPrompt(
                token_ids=tuple(tokens.tolist()),
                logits=tuple(
                    _expected(position, row, sample_ids)
                    for position, row in zip(layout.checked, rows, strict=True)
                ),
                pages=tuple(sums),
                drafts=tuple(
                    _expected(position, row, sample_ids)
                    for position, row in zip(layout.bases, drafted, strict=False)
                ),
            )
            for tokens, rows, sums, drafted in zip(prompts, logits, pages, drafts, strict=True)
        ),
    )


def _built_spec(spec: ModelSpec, options: BuildOptions) -> ModelSpec:
    """Return the spec for the built context length, which selects some rotations and windows."""
    context = context_length(spec, options)
    return replace(within(spec, context), max_position_embeddings=context)


def _prompts(source: ModelSource, length: int) -> list[Tokens]:
    """Return `length` token ids of each of TEXTS; the tokens of shorter texts are repeated."""
    files = source.tokenizer_files()
    try:
        tokenizer = Tokenizer.from_str(files.tokenizer)
        token_ids = [np.array(tokenizer.encode(text).ids, np.int64) for text in TEXTS]
    except BaseException as error:
        if is_library_error(error):
            raise BuildError(f"the model's tokenizer.json is not usable ({error})") from error
        raise
    return [np.resize(each, length) % source.spec.vocab_size for each in token_ids]


def _begin(spec: ModelSpec, weights: StoredWeights, tokens: Tokens) -> tuple[F32, Carried]:
    needed = (PROJECTION, NORM) if spec.layer_inputs else ()
    return begin(
        spec, {name: weights.whole(name) for name in needed}, lambda table: weights.rows(table, tokens)
    )


def _drafts(
    spec: ModelSpec,
    weights: StoredWeights,
    options: BuildOptions,
    layout: TestLayout,
    prompts: Sequence[tuple[Tokens, dict[int, F32], F32]],
) -> list[F32]:
    """Compute the draft layer's logits at the positions `layout.bases` of each prompt, [positions, vocab].

    `prompts`: token ids [tokens], the residual streams that the layer reads, and the main layers' results
    [tokens, hidden]. Without a draft layer, there are no positions.
    """
    if spec.draft is None:
        return [np.zeros((0, spec.vocab_size), np.float32) for _ in prompts]
    number = len(spec.layers)
    head = spec.draft.head(number, spec.head_weight)
    block, has_bytes, found = weights.block(number, without=head), options.kv == "q8_0", []
    for tokens, streams, result in prompts:
        hidden = spec.draft.known_hidden(block, streams, result)
        embedded = weights.rows("token_embd.weight", tokens) * np.float32(spec.embedding_scale)
        *_, cached = run_draft_layer(spec, block, embedded, hidden_before(hidden), None, has_bytes)
        known, unknown = np.stack([cached.keys, cached.values]), np.zeros_like(hidden[:1])
        for base in layout.bases:
            one = embedded[base : base + 1], unknown, known[:, :base]
            found.append(run_draft_layer(spec, block, *one, has_bytes)[0])
    count = len(layout.bases)
    inputs = [np.concatenate(found[i : i + count]) for i in range(0, len(found), count)]
    return [spec.draft.place(logits, block) for logits in _logits(spec, weights, head, inputs)]


def _logits(spec: ModelSpec, weights: StoredWeights, head: str, inputs: Sequence[F32]) -> list[F32]:
    """Compute logits [positions, vocab] for each input of the head [positions, hidden]."""
    hidden = np.concatenate(inputs)
    products = [hidden @ rows.T for rows in weights.slices(head)]
    logits = capped(np.concatenate(products, axis=1), spec.logit_cap)
    return np.split(logits, np.cumsum([len(x) for x in inputs])[:-1])


def _expected(position: int, row: F32, sample_ids: npt.NDArray[np.int64]) -> ExpectedLogits:
    best = np.argsort(-row, kind="stable")[:NUM_BEST]
    return ExpectedLogits(
        position=position,
        sampled=_rounded(row[sample_ids]),
        best_ids=tuple(best.tolist()),
        best=_rounded(row[best]),
    )


def _page_sums(layer: int, kept: CachedTokens | None, layout: TestLayout) -> list[PageSums]:
    """Sum a layer's keys and values by page; empty for layers with a recurrent state."""
    if kept is None:
        return []
    return [
        PageSums(
            layer=layer,
            start=start,
            stop=stop,
            keys=_sums(kept.keys[start:stop]),
            values=_sums(kept.values[start:stop]),
        )
        for start, stop in layout.summed
    ]


def _sums(x: F32) -> tuple[float, float]:
    wide = x.astype(np.float64)
    return _significant(wide.sum()), _significant((wide * wide).sum())


def _rounded(values: F32) -> tuple[float, ...]:
    """Round to six significant digits, which is finer than any tolerance."""
    return tuple(_significant(value) for value in values)


def _significant(value: float) -> float:
    return float(f"{float(value):.6g}")


def tolerance_of(spec: ModelSpec, options: BuildOptions) -> float:
    """Return the maximum error of a logit, in standard deviations (`SelfTestFile`)."""
    of_weights = TOLERANCES[options.weights]
    if options.has_blocks and options.block_bits > 8:
        of_weights = TOLERANCES["bf16"]
    of_types = max(of_weights, KV_TOLERANCES[options.kv])
    return min(MAX_TOLERANCE, of_types * (ROUTED_FACTOR if spec.experts is not None else 1))
