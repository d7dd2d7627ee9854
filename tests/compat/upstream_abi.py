"""A program in the form that upstream's exporter emits, small enough to check by hand.

As torch-mlir hands it to IREE: `!torch.vtensor` arguments, cache slabs as mutable `!torch.tensor`, from
which IREE makes `NAME$async` with coarse fences and a `NAME` without. Its model keeps the tokens
themselves in the cache. The logits at position p are one-hot at

    sum over q <= p of (q + 1) * token[q], modulo VOCABULARY

so an output is right only if every token before it was found in its page, at its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shortfin_apps.llm.contract.config import ModelConfig

STRIDE = 4  # tokens in a page
PAGE = 2 * STRIDE  # elements: tokens in the place of K, nothing in that of V
VOCABULARY = 97
CONTEXT = 48

_ENTRY = """
func.func @{name}(%tokens_: !torch.vtensor<[{n},{s}],si64>, {scalars},
    %ids_: !torch.vtensor<[{n},?],si64>, {slab_arguments}) -> ({result_types}) {{
  %tokens = torch_c.to_builtin_tensor %tokens_ : !torch.vtensor<[{n},{s}],si64> -> tensor<{n}x{s}xi64>
  %ids = torch_c.to_builtin_tensor %ids_ : !torch.vtensor<[{n},?],si64> -> tensor<{n}x?xi64>
  {starts}
  {lens}
  %cache_ = torch.copy.to_vtensor %slab : !torch.vtensor<[?,{page}],f16>
  %cache = torch_c.to_builtin_tensor %cache_ : !torch.vtensor<[?,{page}],f16> -> tensor<?x{page}xf16>
  %one = arith.constant 1 : index
  %stride = arith.constant {stride} : index
  %vocabulary = arith.constant {v} : i64
  %none = arith.constant 0 : i64
  %yes = arith.constant 1.0 : f16
  %no = arith.constant 0.0 : f16
  %length = tensor.dim %tokens, %one : tensor<{n}x{s}xi64>

  // Every token into its page, padding included, as upstream does: seen from the page.
  %written = linalg.generic {{
      indexing_maps = [affine_map<(page, slot, n, s) -> (n, s)>, affine_map<(page, slot, n, s) -> (n)>,
                       affine_map<(page, slot, n, s) -> (page, slot)>],
      iterator_types = ["parallel", "parallel", "reduction", "reduction"]}}
      ins(%tokens, %starts : tensor<{n}x{s}xi64>, tensor<{n}xi64>)
      outs(%cache : tensor<?x{page}xf16>) {{
  ^bb0(%token: i64, %start: i64, %kept: f16):
    %page = linalg.index 0 : index
    %slot = linalg.index 1 : index
    %row = linalg.index 2 : index
    %s_ = linalg.index 3 : index
    %begin = arith.index_cast %start : i64 to index
    %position = arith.addi %begin, %s_ : index
    %block = arith.divui %position, %stride : index
    %its_slot = arith.remui %position, %stride : index
    %its_page_ = tensor.extract %ids[%row, %block] : tensor<{n}x?xi64>
    %its_page = arith.index_cast %its_page_ : i64 to index
    %same_page = arith.cmpi eq, %page, %its_page : index
    %same_slot = arith.cmpi eq, %slot, %its_slot : index
    %here = arith.andi %same_page, %same_slot : i1
    %stored = arith.sitofp %token : i64 to f16
    %next = arith.select %here, %stored, %kept : f16
    linalg.yield %next : f16
  }} -> tensor<?x{page}xf16>

  %sums_empty = tensor.empty({s_size}) : tensor<{n}x{s}xi64>
  %sums_zero = linalg.fill ins(%none : i64) outs(%sums_empty : tensor<{n}x{s}xi64>) -> tensor<{n}x{s}xi64>
  %slots = tensor.empty() : tensor<{stride}xi64>
  %sums = linalg.generic {{
      indexing_maps = [affine_map<(n, s, b, i) -> (n, b)>, affine_map<(n, s, b, i) -> (n)>,
                       affine_map<(n, s, b, i) -> (n)>, affine_map<(n, s, b, i) -> (i)>,
                       affine_map<(n, s, b, i) -> (n, s)>],
      iterator_types = ["parallel", "parallel", "reduction", "reduction"]}}
      ins(%ids, %starts, %lens, %slots : tensor<{n}x?xi64>, tensor<{n}xi64>, tensor<{n}xi64>,
          tensor<{stride}xi64>)
      outs(%sums_zero : tensor<{n}x{s}xi64>) {{
  ^bb0(%id: i64, %start: i64, %len: i64, %unused: i64, %sum: i64):
    %s_ = linalg.index 1 : index
    %b_ = linalg.index 2 : index
    %i_ = linalg.index 3 : index
    %page = arith.index_cast %id : i64 to index
    %value_ = tensor.extract %written[%page, %i_] : tensor<?x{page}xf16>
    %value = arith.fptosi %value_ : f16 to i64
    %before = arith.muli %b_, %stride : index
    %q_ = arith.addi %before, %i_ : index
    %weight_ = arith.addi %q_, %one : index
    %weight = arith.index_cast %weight_ : index to i64
    %q = arith.index_cast %q_ : index to i64
    %s = arith.index_cast %s_ : index to i64
    %p = arith.addi %start, %s : i64
    %past = arith.cmpi sle, %q, %p : i64
    %valid = arith.cmpi slt, %q, %len : i64
    %seen = arith.andi %past, %valid : i1
    %term = arith.muli %value, %weight : i64
    %counted = arith.select %seen, %term, %none : i64
    %total = arith.addi %sum, %counted : i64
    linalg.yield %total : i64
  }} -> tensor<{n}x{s}xi64>
  {result}
  %new = torch_c.from_builtin_tensor %written : tensor<?x{page}xf16> -> !torch.vtensor<[?,{page}],f16>
  torch.overwrite.tensor.contents %new overwrites %slab
      : !torch.vtensor<[?,{page}],f16>, !torch.tensor<[?,{page}],f16>
  {return_}
}}
"""
_LOGITS = """
  %logits_empty = tensor.empty({s_size}) : tensor<{n}x{s}x{v}xf16>
  %logits = linalg.generic {{
      indexing_maps = [affine_map<(n, s, v) -> (n, s)>, affine_map<(n, s, v) -> (n, s, v)>],
      iterator_types = ["parallel", "parallel", "parallel"]}}
      ins(%sums : tensor<{n}x{s}xi64>) outs(%logits_empty : tensor<{n}x{s}x{v}xf16>) {{
  ^bb0(%sum: i64, %out: f16):
    %best = arith.remsi %sum, %vocabulary : i64
    %candidate_ = linalg.index 2 : index
    %candidate = arith.index_cast %candidate_ : index to i64
    %hit = arith.cmpi eq, %best, %candidate : i64
    %logit = arith.select %hit, %yes, %no : f16
    linalg.yield %logit : f16
  }} -> tensor<{n}x{s}x{v}xf16>
  %first = torch_c.from_builtin_tensor %logits
      : tensor<{n}x{s}x{v}xf16> -> !torch.vtensor<[{n},{s},{v}],f16>
"""
_ARGMAX = """
  %pair_empty = tensor.empty({s_size}) : tensor<{n}x{s}x1xi64>
  %value_empty = tensor.empty({s_size}) : tensor<{n}x{s}x1xf16>
  %values = linalg.fill ins(%yes : f16) outs(%value_empty : tensor<{n}x{s}x1xf16>) -> tensor<{n}x{s}x1xf16>
  %indices = linalg.generic {{
      indexing_maps = [affine_map<(n, s, k) -> (n, s)>, affine_map<(n, s, k) -> (n, s, k)>],
      iterator_types = ["parallel", "parallel", "parallel"]}}
      ins(%sums : tensor<{n}x{s}xi64>) outs(%pair_empty : tensor<{n}x{s}x1xi64>) {{
  ^bb0(%sum: i64, %out: i64):
    %best = arith.remsi %sum, %vocabulary : i64
    linalg.yield %best : i64
  }} -> tensor<{n}x{s}x1xi64>
  %first = torch_c.from_builtin_tensor %values : tensor<{n}x{s}x1xf16> -> !torch.vtensor<[{n},{s},1],f16>
  %second = torch_c.from_builtin_tensor %indices : tensor<{n}x{s}x1xi64> -> !torch.vtensor<[{n},{s},1],si64>
"""


@dataclass(frozen=True)
class Variant:
    """The export flags of upstream that shape a program."""

    has_prefill_position: bool = False
    top_k: int | None = None
    prefill_batch_sizes: tuple[int, ...] = (1, 4)
    decode_batch_sizes: tuple[int, ...] = (4,)

    def module(self) -> str:
        """The program's source, in the torch dialect."""
        prefills = [self._entry("prefill", n) for n in self.prefill_batch_sizes]
        decodes = [self._entry("decode", n) for n in self.decode_batch_sizes]
        return "module @module {\n" + "\n".join(prefills + decodes) + "}\n"

    def config(self, pages: int = 16) -> ModelConfig:
        """The JSON that upstream writes beside it."""
        return ModelConfig.from_dict(
            {
                "module_name": "module",
                "module_abi_version": 1,
                "max_seq_len": CONTEXT,
                "attn_head_dim": 1,
                "prefill_batch_sizes": list(self.prefill_batch_sizes),
                "has_prefill_position": self.has_prefill_position,
                "decode_batch_sizes": list(self.decode_batch_sizes),
                "transformer_block_count": 1,
                "logits_normalization": "none",
                "top_k": self.top_k,
                "paged_kv_cache": {
                    "attention_head_count_kv": 1,
                    "block_seq_stride": STRIDE,
                    "device_block_count": pages,
                    "kv_cache_dtype": "float16",
                    "paged_kv_block_size_elements_per_device": [PAGE],
                },
            }
        )

    def _entry(self, family: str, n: int) -> str:
        decodes = family == "decode"
        s = "1" if decodes else "?"
        shape = {
            "n": n,
            "s": s,
            "v": VOCABULARY,
            "stride": STRIDE,
            "page": PAGE,
            "s_size": "" if decodes else "%length",
        }
        logits = f"!torch.vtensor<[{n},{s},{VOCABULARY}],f16>"
        pair = f"!torch.vtensor<[{n},{s},1],f16>, !torch.vtensor<[{n},{s},1],si64>"
        types, names = (logits, "%first") if self.top_k is None else (pair, "%first, %second")
        return _ENTRY.format(
            name=f"{family}_bs{n}",
            scalars=", ".join(f"%{name}_: !torch.vtensor<[{n}],si64>" for name in self._scalars(decodes)),
            slab_arguments=f"%slab: !torch.tensor<[?,{PAGE}],f16>",
            starts=_vector("starts", n)
            if "starts" in self._scalars(decodes)
            else f"%starts = arith.constant dense<0> : tensor<{n}xi64>",
            lens=_vector("lens", n),
            result_types=types,
            result=(_LOGITS if self.top_k is None else _ARGMAX).format(**shape),
            return_=f"return {names} : {types}",
            **shape,
        )

    def _scalars(self, decodes: bool) -> list[str]:
        """The arguments after the tokens; their order differs between prefill and decode."""
        if decodes:
            return ["lens", "starts"]
        return ["starts", "lens"] if self.has_prefill_position else ["lens"]


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that the program's model generates after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum((q + 1) * token for q, token in enumerate(tokens)) % VOCABULARY)
    return tokens[len(prompt) :]


def compile_to(path: Path, variant: Variant) -> Path:
    import iree.compiler as compiler

    compiler.compile_str(
        variant.module(),
        output_file=str(path),
        extra_args=[
            "--iree-hal-target-device=local",
            "--iree-hal-local-target-device-backends=llvm-cpu",
            "--iree-llvmcpu-target-cpu=host",
        ],
    )
    return path


def _vector(name: str, n: int) -> str:
    return f"%{name} = torch_c.to_builtin_tensor %{name}_ : !torch.vtensor<[{n}],si64> -> tensor<{n}xi64>"
