"""Sampling from top-k candidates on the device, in integer linalg, as `sampling_rule.py` defines.

`sampling` [fields, rows] i64 has the sampling parameters: `sampling[field, row]` for each `SamplingField` of
`abi.py` and each sequence (row) of the batch.
"""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor, tensor_type
from shortfin_apps.llm.contract.abi import NOT_FINITE, SamplingField
from shortfin_apps.llm.contract.sampling_rule import (
    FRACTION_BITS,
    LOWEST_EXPONENT,
    PHILOX_MULTIPLIERS,
    PHILOX_ROUNDS,
    PHILOX_WEYL,
    POLYNOMIAL,
    POLYNOMIAL_BITS,
    SHARE_BITS,
    WEIGHT_BITS,
)

_WORD = 1 << 64


def sample(e: Emitter, values: Tensor, indices: Tensor, sampling: Tensor, positions: Tensor) -> Tensor:
    """Sample the next token of each row, [rows] i64; NOT_FINITE if the row's largest logit is not finite.

    `values` [rows, k] f32: the largest logits, descending; `indices` [rows, k] i64: their token ids;
    `positions` [rows] i64: the position of each row's input token in its sequence.
    """
    weights = _weights(e, values, sampling)
    before = _before(e, weights)
    kept = _filtered(e, weights, before, _total(e, weights, before), sampling)
    targets = _targets(e, _sums(e, kept), sampling, positions)
    return _spoiled(e, _drawn(e, kept, before, targets, indices), values)


def store_tokens(
    e: Emitter, token_ids: Tensor, slots: Tensor, positions: Tensor, last_tokens: Tensor
) -> Tensor:
    """Store the tokens that were drawn, token_ids [rows] i64, in last_tokens [slots] i64, in place.

    The token of row r goes to slot slots[r]. Nothing is stored for a padding row (negative position), a
    negative slot, or a row with the token id NOT_FINITE.
    """
    body = """\
  %s = linalg.index 0 : index
  %slot = arith.index_cast %s : index to i64
  %is_its = arith.cmpi eq, %a, %slot : i64
  %zero = arith.constant 0 : i64
  %is_used = arith.cmpi sge, %b, %zero : i64
  %is_drawn = arith.cmpi sge, %c, %zero : i64
  %has_token = arith.andi %is_used, %is_drawn : i1
  %stores = arith.andi %is_its, %has_token : i1
  %y = arith.select %stores, %c, %out : i64
  linalg.yield %y : i64"""
    ins = [(slots, "n"), (positions, "n"), (token_ids, "n")]
    return e.elementwise("sn", ("s", last_tokens.shape, "i64"), ins, body, last_tokens)


def advance(e: Emitter, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return the next `positions` [rows] i64 of a decode loop; positions of padding rows do not change."""
    n = ("n", positions.shape, "i64")
    return e.elementwise("n", n, [(positions, "n"), (token_ids, "n")], _NEXT_POSITION)


# IREE does not know that the result is written over the argument `positions`. The comparison of the token,
# which is never below NOT_FINITE, orders the write after the draws, which read the argument.
_NEXT_POSITION = f"""\
  %zero = arith.constant 0 : i64
  %is_padding = arith.cmpi slt, %a, %zero : i64
  %least = arith.constant {NOT_FINITE} : i64
  %is_no_token = arith.cmpi slt, %b, %least : i64
  %stays = arith.ori %is_padding, %is_no_token : i1
  %one = arith.constant 1 : i64
  %next = arith.addi %a, %one : i64
  %y = arith.select %stays, %a, %next : i64
  linalg.yield %y : i64"""


def _field(e: Emitter, sampling: Tensor, field: SamplingField) -> Tensor:
    """Return one field of `sampling`, [rows] i64."""
    _, rows = sampling.shape
    kind = tensor_type((1, rows), "i64")
    row = e.tensor(
        f"tensor.extract_slice {sampling.name}[{field.value}, 0] [1, {rows}] [1, 1] : "
        f"{sampling.type} to {kind}",
        (1, rows),
        "i64",
    )
    return e.reshape(row, (rows,))


def _weights(e: Emitter, values: Tensor, sampling: Tensor) -> Tensor:
    """Compute the weights of the candidates, [rows, k] i64; 0 for candidates outside the row's own top-k."""
    body = f"""\
  %bits = arith.trunci %c : i64 to i32
  %factor = arith.bitcast %bits : i32 to f32
  %below = arith.subf %a, %b : f32
  %scaled = arith.mulf %below, %factor : f32
  %lowest = arith.constant {float(LOWEST_EXPONENT)} : f32
  %bounded = arith.maxnumf %scaled, %lowest : f32
  %exponent = arith.fptosi %bounded : f32 to i32
  %mask = arith.constant {(1 << FRACTION_BITS) - 1} : i32
  %low = arith.andi %exponent, %mask : i32
  %fraction = arith.extui %low : i32 to i64
  %fraction_bits = arith.constant {FRACTION_BITS} : i64
{_polynomial()}\
  %headroom = arith.constant {WEIGHT_BITS - POLYNOMIAL_BITS} : i64
  %raised = arith.shli %p0, %headroom : i64
  %fraction_bits32 = arith.constant {FRACTION_BITS} : i32
  %whole = arith.shrsi %exponent, %fraction_bits32 : i32
  %zero32 = arith.constant 0 : i32
  %halvings = arith.subi %zero32, %whole : i32
  %shift = arith.extui %halvings : i32 to i64
  %weight = arith.shrui %raised, %shift : i64
  %k = linalg.index 1 : index
  %place = arith.index_cast %k : index to i64
  %passes = arith.cmpi slt, %place, %d : i64
  %zero = arith.constant 0 : i64
  %y = arith.select %passes, %weight, %zero : i64
  linalg.yield %y : i64"""
    best = e.columns(values, 0, 1)
    rows = e.reshape(best, (values.shape[0],))
    scale = _field(e, sampling, SamplingField.SCALE)
    top_k = _field(e, sampling, SamplingField.TOP_K)
    ins = [(values, "nk"), (rows, "n"), (scale, "n"), (top_k, "n")]
    return e.elementwise("nk", ("nk", values.shape, "i64"), ins, body)


def _polynomial() -> str:
    """Return MLIR that sets %p0 to the polynomial of %fraction, by Horner's rule."""
    last = len(POLYNOMIAL) - 1
    lines = [f"  %p{last} = arith.constant {POLYNOMIAL[last]} : i64"]
    for i in reversed(range(last)):
        lines += [
            f"  %product{i} = arith.muli %p{i + 1}, %fraction : i64",
            f"  %term{i} = arith.shrui %product{i}, %fraction_bits : i64",
            f"  %c{i} = arith.constant {POLYNOMIAL[i]} : i64",
            f"  %p{i} = arith.addi %term{i}, %c{i} : i64",
        ]
    return "\n".join(lines) + "\n"


def _before(e: Emitter, weights: Tensor) -> Tensor:
    """Sum the weights of the candidates before each candidate, [rows, k] i64."""
    body = """\
  %k = linalg.index 1 : index
  %j = linalg.index 2 : index
  %earlier = arith.cmpi ult, %j, %k : index
  %zero = arith.constant 0 : i64
  %add = arith.select %earlier, %a, %zero : i64
  %sum = arith.addi %out, %add : i64
  linalg.yield %sum : i64"""
    zero = e.fill("0", weights.shape, "i64")
    return e.elementwise("nkj", ("nk", weights.shape, "i64"), [(weights, "nj")], body, zero)


def _total(e: Emitter, weights: Tensor, before: Tensor) -> Tensor:
    """Return the sum of each row's weights, [rows] i64: the last weight plus the sum before it.

    A reduction is avoided, as IREE would fuse it with `_weights` and then fail to compile for AMD GPUs.
    """
    body = "  %sum = arith.addi %a, %b : i64\n  linalg.yield %sum : i64"
    rows, k = weights.shape
    assert isinstance(k, int)
    last = [e.reshape(e.columns(t, k - 1, 1), (rows,)) for t in (weights, before)]
    return e.elementwise("n", ("n", (rows,), "i64"), [(t, "n") for t in last], body)


def _sums(e: Emitter, weights: Tensor) -> Tensor:
    """Sum each row's weights, [rows] i64."""
    body = "  %sum = arith.addi %out, %a : i64\n  linalg.yield %sum : i64"
    shape = (weights.shape[0],)
    return e.elementwise("nk", ("n", shape, "i64"), [(weights, "nk")], body, e.fill("0", shape, "i64"))


def _filtered(e: Emitter, weights: Tensor, before: Tensor, masses: Tensor, sampling: Tensor) -> Tensor:
    """Return the weights that pass top-p and min-p, 0 for others, [rows, k] i64; the largest always passes.

    `masses` [rows] i64: the sum of each row's weights.
    """
    body = f"""\
  %share_bits = arith.constant {SHARE_BITS} : i64
  %mask = arith.constant {(1 << SHARE_BITS) - 1} : i64
  %high = arith.shrui %c, %share_bits : i64
  %low = arith.andi %c, %mask : i64
  %high_share = arith.muli %high, %d : i64
  %low_product = arith.muli %low, %d : i64
  %low_share = arith.shrui %low_product, %share_bits : i64
  %within = arith.addi %high_share, %low_share : i64
  %in_share = arith.cmpi slt, %b, %within : i64
  %is_likely = arith.cmpi sge, %a, %e : i64
  %k = linalg.index 1 : index
  %c0 = arith.constant 0 : index
  %is_best = arith.cmpi eq, %k, %c0 : index
  %passes_both = arith.andi %in_share, %is_likely : i1
  %passes = arith.ori %is_best, %passes_both : i1
  %zero = arith.constant 0 : i64
  %y = arith.select %passes, %a, %zero : i64
  linalg.yield %y : i64"""
    share = _field(e, sampling, SamplingField.SHARE)
    least = _field(e, sampling, SamplingField.LEAST_WEIGHT)
    ins = [(weights, "nk"), (before, "nk"), (masses, "n"), (share, "n"), (least, "n")]
    return e.elementwise("nk", ("nk", weights.shape, "i64"), ins, body)


def _targets(e: Emitter, masses: Tensor, sampling: Tensor, positions: Tensor) -> Tensor:
    """Draw a random integer for each row, [rows] i64, from 0 to the row's mass (exclusive)."""
    body = f"""\
  %index = arith.subi %b, %d : i64
  %two = arith.constant 2 : i64
  %zero = arith.constant 0 : i64
  %count = arith.addi %index, %two : i64
{_philox()}\
  %low, %high = arith.mului_extended %word, %a : i64
  linalg.yield %high : i64"""
    seed = _field(e, sampling, SamplingField.SEED)
    prompt_length = _field(e, sampling, SamplingField.PROMPT_LENGTH)
    ins = [(masses, "n"), (positions, "n"), (seed, "n"), (prompt_length, "n")]
    return e.elementwise("n", ("n", masses.shape, "i64"), ins, body)


def _philox() -> str:
    """Return MLIR that sets %word to a Philox random word.

    The key is the seed %c; the counter is %count, the token's index in the output + 1.
    """
    lines, counter, keys = [], ["%count", "%zero", "%zero", "%zero"], ["%c", "%zero"]
    for i, multiplier in enumerate(PHILOX_MULTIPLIERS):
        lines.append(f"  %m{i} = arith.constant {_signed(multiplier)} : i64")
        lines.append(f"  %w{i} = arith.constant {_signed(PHILOX_WEYL[i])} : i64")
    for r in range(PHILOX_ROUNDS):
        lines += [
            f"  %low0_{r}, %high0_{r} = arith.mului_extended %m0, {counter[0]} : i64",
            f"  %low1_{r}, %high1_{r} = arith.mului_extended %m1, {counter[2]} : i64",
            f"  %x0_{r} = arith.xori %high1_{r}, {counter[1]} : i64",
            f"  %y0_{r} = arith.xori %x0_{r}, {keys[0]} : i64",
            f"  %x1_{r} = arith.xori %high0_{r}, {counter[3]} : i64",
            f"  %y1_{r} = arith.xori %x1_{r}, {keys[1]} : i64",
            f"  %k0_{r} = arith.addi {keys[0]}, %w0 : i64",
            f"  %k1_{r} = arith.addi {keys[1]}, %w1 : i64",
        ]
        counter = [f"%y0_{r}", f"%low1_{r}", f"%y1_{r}", f"%low0_{r}"]
        keys = [f"%k0_{r}", f"%k1_{r}"]
    lines.append(f"  %word = arith.xori {counter[0]}, %zero : i64")
    return "\n".join(lines) + "\n"


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


def _drawn(e: Emitter, kept: Tensor, before: Tensor, targets: Tensor, indices: Tensor) -> Tensor:
    """Select the token with before <= target < before + kept weight, [rows] i64."""
    body = """\
  %begun = arith.cmpi sle, %b, %c : i64
  %end = arith.addi %b, %a : i64
  %not_over = arith.cmpi slt, %c, %end : i64
  %is_it = arith.andi %begun, %not_over : i1
  %y = arith.select %is_it, %d, %out : i64
  linalg.yield %y : i64"""
    shape = targets.shape
    ins = [(kept, "nk"), (before, "nk"), (targets, "n"), (indices, "nk")]
    return e.elementwise("nk", ("n", shape, "i64"), ins, body, e.fill(str(NOT_FINITE), shape, "i64"))


def _spoiled(e: Emitter, token_ids: Tensor, values: Tensor) -> Tensor:
    """Return the token ids, [rows] i64, with NOT_FINITE where the row's largest logit is infinite or NaN."""
    body = f"""\
  %bits = arith.bitcast %b : f32 to i32
  %mask = arith.constant {0x7F800000} : i32
  %exponent = arith.andi %bits, %mask : i32
  %is_finite = arith.cmpi ne, %exponent, %mask : i32
  %spoiled = arith.constant {NOT_FINITE} : i64
  %y = arith.select %is_finite, %a, %spoiled : i64
  linalg.yield %y : i64"""
    best = e.reshape(e.columns(values, 0, 1), token_ids.shape)
    return e.elementwise("n", ("n", token_ids.shape, "i64"), [(token_ids, "n"), (best, "n")], body)
