"""Gated delta nets (model/delta_net.py): convolution, recurrence and gated norm, token by token."""

import triton
import triton.language as tl

from shortfin_apps.llm.builder.kernels.triton.synchronisation import memory_barrier


@triton.jit
def delta_rule(
    mixed, rates, conv, steps, norm, offsets, followers, starts, seq_lens, blocks, cache, out, tokens, rows,
    width, layer,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr, TAPS: tl.constexpr, TILED: tl.constexpr,
    STRIDE: tl.constexpr, STATE: tl.constexpr, PAGE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Compute out [tokens, VALUE_HEADS * VALUE_DIM], and write states to the pages of `cache`.

    `mixed` [tokens, channels + VALUE_HEADS * VALUE_DIM] f32 holds the inputs of the convolution (q and k of
    all key heads, v of all value heads), then the gates of the result. `rates` [tokens, 2 * VALUE_HEADS] f32
    holds b and a. `conv` is [TAPS, channels] f32, `steps` [2 * VALUE_HEADS] and `norm` [VALUE_DIM] f32. If
    `offsets` is None, each batch row is one token; if `followers` is None, no row continues another. A page
    has PAGE elements of f32, STATE per layer: each value head's past inputs
    [TAPS - 1, 2 * KEY_DIM + VALUE_DIM], then the head's S [KEY_DIM, VALUE_DIM]. BLOCK_KEY and BLOCK_VALUE are
    KEY_DIM and VALUE_DIM rounded up to powers of two.

    A workgroup handles one value head of one batch row, and keeps the head's state in registers from the
    row's first token to the last. The state is read from the page of the preceding token. It is written to
    the page of each block that the tokens complete, and to the page of the last token, but never to page 0.
    The output of padding is zeros.

    A row's followers (abi.py), of one token each, are computed with the row, as if they were tokens of it.
    The state after each of them is written to the page that its own row of the block table names.
    """
    HEAD: tl.constexpr = STATE // VALUE_HEADS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    FEATURES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    head = tl.program_id(0)
    row = tl.program_id(1)
    num_followers = 0 if followers is None else tl.load(followers + row).to(tl.int32)
    start, count, first, end = _tokens_of(
        row, num_followers, offsets, starts, seq_lens, tokens, rows, width, STRIDE
    )  # fmt: skip
    to_next_table = tl.where(num_followers > 0, width, 0)  # from a token's block table to the next one's
    blocks += row.to(tl.int64) * width
    cache += layer.to(tl.int64) * STATE + head * HEAD

    key = tl.arange(0, BLOCK_KEY)
    value = tl.arange(0, BLOCK_VALUE)
    is_key = key < KEY_DIM
    is_value = value < VALUE_DIM
    of_key = (head % KEY_HEADS if TILED else head // (VALUE_HEADS // KEY_HEADS)) * KEY_DIM + key
    of_value = head * VALUE_DIM + value
    at_q = of_key
    at_k = KEY_HEADS * KEY_DIM + of_key
    at_v = 2 * KEY_HEADS * KEY_DIM + of_value
    q_taps = _load_rows(conv + at_q, is_key, CHANNELS, TAPS)
    k_taps = _load_rows(conv + at_k, is_key, CHANNELS, TAPS)
    v_taps = _load_rows(conv + at_v, is_value, CHANNELS, TAPS)
    shift = tl.load(steps + head)
    slope = tl.load(steps + VALUE_HEADS + head)
    norm_weight = tl.load(norm + value, mask=is_value, other=0.0)

    # At position 0 there is no state, and no page is read.
    is_begun = (count > 0) & (start > 0)
    source = cache + tl.load(blocks + (start - 1) // STRIDE, mask=is_begun, other=0) * PAGE
    state, q_past, k_past, v_past = _load_state(
        source, is_begun, key, value, KEY_DIM, VALUE_DIM, TAPS
    )  # fmt: skip
    memory_barrier()  # the loads above must finish before the stores of other lanes below

    for index in range(count):
        token = (first + index).to(tl.int64)
        inputs = mixed + token * (CHANNELS + FEATURES)
        q, q_past = _convolved(inputs + at_q, is_key, q_past, q_taps, TAPS)
        k, k_past = _convolved(inputs + at_k, is_key, k_past, k_taps, TAPS)
        v, v_past = _convolved(inputs + at_v, is_value, v_past, v_taps, TAPS)
        rates_at = rates + token * (2 * VALUE_HEADS) + head
        beta = tl.sigmoid(tl.load(rates_at))
        decay = tl.exp(slope * _softplus(tl.load(rates_at + VALUE_HEADS) + shift))
        q = _unit(q)[:, None]
        k = _unit(k)[:, None]
        state *= decay
        state += k * ((v - tl.sum(state * k, axis=0)) * beta)[None, :]
        read = tl.sum(state * q, axis=0) * KEY_DIM**-0.5
        read *= tl.rsqrt(tl.sum(read * read, axis=0) / VALUE_DIM + EPS) * norm_weight
        gate = tl.load(inputs + CHANNELS + of_value, mask=is_value, other=0.0)
        gated = read * gate * tl.sigmoid(gate)
        tl.store(out + token * FEATURES + of_value, gated.to(out.dtype.element_ty), mask=is_value)
        past_token = start + index + 1
        if (past_token % STRIDE == 0) | (index == count - 1) | (num_followers > 0):
            page = tl.load(blocks + index * to_next_table + (past_token - 1) // STRIDE)
            if page != 0:
                _store_state(
                    cache + page * PAGE, state, q_past, k_past, v_past, key, value, KEY_DIM, VALUE_DIM, TAPS
                )
    nothing = tl.zeros((BLOCK_VALUE,), out.dtype.element_ty)
    for index in range(count, end - first):
        token = (first + index).to(tl.int64)
        tl.store(out + token * FEATURES + of_value, nothing, mask=is_value)


@triton.jit
def _tokens_of(row, num_followers, offsets, starts, seq_lens, tokens, rows, width, STRIDE: tl.constexpr):
    """Return a row's start position, number of tokens, first token, and the first token of the next row.

    The last two are indices of tokens in the batch. The tokens of followers count as the row's; a row that
    follows another (`num_followers` is negative) has none.
    """
    last_row = tl.minimum(row + tl.maximum(num_followers, 0), rows - 1)
    start = tl.load(starts + row).to(tl.int32)
    known = tl.minimum(tl.load(seq_lens + last_row).to(tl.int32), width * STRIDE)
    count = tl.maximum(known - start, 0)
    if offsets is None:
        return start, tl.minimum(count, 1), row, row + 1
    else:
        first = tl.load(offsets + row).to(tl.int32)
        following = tl.load(offsets + last_row + 1, mask=last_row + 1 < rows, other=0).to(tl.int32)
        end = tl.minimum(tl.where(last_row + 1 < rows, following, tokens), tokens)
        end = tl.where(num_followers < 0, first, end)
        return start, tl.maximum(tl.minimum(count, end - first), 0), first, end


@triton.jit
def _load_rows(first, inside, APART: tl.constexpr, COUNT: tl.constexpr):
    """Load COUNT vectors from address `first` on, APART elements apart; 0 where not `inside`."""
    vectors = ()
    for number in tl.static_range(COUNT):
        vector = tl.load(first + number * APART, mask=inside, other=0.0)
        vectors = vectors + (vector,)  # type: ignore[assignment]  # noqa: RUF005  (Triton does not unpack)
    return vectors


@triton.jit
def _load_state(
    source, is_begun, key, value, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TAPS: tl.constexpr
):
    """Load S and the past inputs of q, k and v from a page; all are zeros unless `is_begun`."""
    HEAD_CHANNELS: tl.constexpr = 2 * KEY_DIM + VALUE_DIM
    is_key = is_begun & (key < KEY_DIM)
    is_value = is_begun & (value < VALUE_DIM)
    q_past = _load_rows(source + key, is_key, HEAD_CHANNELS, TAPS - 1)
    k_past = _load_rows(source + KEY_DIM + key, is_key, HEAD_CHANNELS, TAPS - 1)
    v_past = _load_rows(source + 2 * KEY_DIM + value, is_value, HEAD_CHANNELS, TAPS - 1)
    at = (TAPS - 1) * HEAD_CHANNELS + key[:, None] * VALUE_DIM + value[None, :]
    state = tl.load(source + at, mask=is_key[:, None] & is_value[None, :], other=0.0)
    return state, q_past, k_past, v_past


@triton.jit
def _store_state(
    target, state, q_past, k_past, v_past, key, value,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Store S and the past inputs of q, k and v to a page, from which `_load_state` loads them."""
    HEAD_CHANNELS: tl.constexpr = 2 * KEY_DIM + VALUE_DIM
    for tap in tl.static_range(TAPS - 1):
        past = target + tap * HEAD_CHANNELS
        tl.store(past + key, q_past[tap], mask=key < KEY_DIM)
        tl.store(past + KEY_DIM + key, k_past[tap], mask=key < KEY_DIM)
        tl.store(past + 2 * KEY_DIM + value, v_past[tap], mask=value < VALUE_DIM)
    at = (TAPS - 1) * HEAD_CHANNELS + key[:, None] * VALUE_DIM + value[None, :]
    tl.store(target + at, state, mask=(key < KEY_DIM)[:, None] & (value < VALUE_DIM)[None, :])


@triton.jit
def _convolved(at, inside, past, taps, TAPS: tl.constexpr):
    """Return the SiLU of the convolution at a token, and the past inputs of the next token.

    `past` are the preceding inputs, and `at` is the address of the token's input.
    """
    inputs = past + (tl.load(at, mask=inside, other=0.0),)  # noqa: RUF005  (Triton does not unpack)
    total = inputs[0] * taps[0]
    for tap in tl.static_range(1, TAPS):
        total += inputs[tap] * taps[tap]
    return total * tl.sigmoid(total), inputs[1:]


@triton.jit
def _unit(x):
    """Divide `x` by its L2 norm."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x))."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
