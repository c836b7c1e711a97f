"""Device functions of the kernels that write and gather keys and prepare queries.

Rows of D channels are held as pairs, a and b [R, D / 2] float32 each: the two channels that RoPE turns. Interleaved,
pair j is channels (2j, 2j + 1); else channels come in groups of 2 * HALF, and pair j is channel
j // HALF * 2 * HALF + j % HALF and that HALF further. So no step moves a channel from one lane to another, but the
Hadamard rotation, which is a matrix product. Where they allow it, an interleaved pair is loaded as one word.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_channels(D: tl.constexpr, HALF: tl.constexpr):
    """[D / 2]: the first channel of each pair that is not interleaved."""
    pair = tl.arange(0, D // 2)
    return pair // HALF * (2 * HALF) + pair % HALF


@triton.jit
def load_pairs(rows, mask, R: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rows at pointers [R], as pairs."""
    if rows.dtype.element_ty.is_int():
        a, b = _of_words(tl.load(rows[:, None] + tl.arange(0, D // 2)[None, :], mask=mask[:, None], other=0))
    elif INTERLEAVED:
        x = tl.load(rows[:, None] + tl.arange(0, D)[None, :], mask=mask[:, None], other=0.0)
        a, b = tl.split(tl.reshape(x, [R, D // 2, 2]))
    else:
        first = rows[:, None] + first_channels(D, HALF)[None, :]
        a = tl.load(first, mask=mask[:, None], other=0.0)
        b = tl.load(first + HALF, mask=mask[:, None], other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _of_words(word):
    """Two bfloat16 of an int32, two float32 of an int64."""
    if word.dtype == tl.int32:
        a = (word << 16).to(tl.float32, bitcast=True)
        b = ((word >> 16) << 16).to(tl.float32, bitcast=True)
    else:
        a = word.to(tl.int32).to(tl.float32, bitcast=True)
        b = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return a, b


@triton.jit
def _vector_pairs(pointer, R: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """A vector of D channels as the pairs of R rows: a lane reads those of its rows, and none goes between lanes."""
    if pointer.dtype.element_ty.is_int():
        a, b = _of_words(tl.load(tl.broadcast_to((pointer + tl.arange(0, D // 2))[None, :], [R, D // 2])))
    else:
        first = 2 * tl.arange(0, D // 2) if INTERLEAVED else first_channels(D, HALF)
        at = tl.broadcast_to((pointer + first)[None, :], [R, D // 2])
        a, b = tl.load(at), tl.load(at + (1 if INTERLEAVED else HALF))
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def layer_norm(
    a, b, weight_ptr, bias_ptr, eps, R: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    mean = (tl.sum(a, axis=1) + tl.sum(b, axis=1)) * (1.0 / D)
    a -= mean[:, None]
    b -= mean[:, None]
    variance = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) * (1.0 / D)
    rest = tl.rsqrt(variance + eps)
    a_weight, b_weight = _vector_pairs(weight_ptr, R, D, HALF, INTERLEAVED)
    a = a * rest[:, None] * a_weight
    b = b * rest[:, None] * b_weight
    if bias_ptr is not None:
        a_bias, b_bias = _vector_pairs(bias_ptr, R, D, HALF, INTERLEAVED)
        a += a_bias
        b += b_bias
    return a, b


@triton.jit
def rotate(a, b, cos_sin, mask, D: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr):
    """RoPE of the pairs of one group; `cos_sin` [R] points to the cosines of each row's position, its sines behind."""
    pair = tl.arange(0, D // 2)
    turned = mask[:, None] & (pair // HALF == GROUP)[None, :]
    at = cos_sin[:, None] + (pair % HALF)[None, :]
    cos = tl.load(at, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(at + HALF, mask=turned, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _signs(W: tl.constexpr):
    """float16 [W, W] of 1 and -1, W at most 256: the parity of the bits that row and column share."""
    shared = tl.arange(0, W)[:, None] & tl.arange(0, W)[None, :]
    shared ^= shared >> 4
    shared ^= shared >> 2
    shared ^= shared >> 1
    return (0x3C00 | ((shared & 1) << 15)).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _product(x, signs):
    """float32 x @ signs, x of at most 2^15 as the sum of two float16: 23 bits of the row's largest."""
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)).to(tl.float16)
    return tl.dot(high, signs, tl.dot(low, signs))


@triton.jit
def hadamard(a, b, D: tl.constexpr):
    """The bit of the channel in which a pair's two differ is one stage; the others are a product on matrix units, of
    rows scaled by a power of two to what float16 holds."""
    SCALE: tl.constexpr = D**-0.5
    amax = tl.maximum(tl.max(tl.abs(a), axis=1), tl.max(tl.abs(b), axis=1))
    exponent = tl.minimum(267 - (amax.to(tl.int32, bitcast=True) >> 23), 253)
    up = (exponent << 23).to(tl.float32, bitcast=True)[:, None]
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None] * SCALE
    signs = _signs(D // 2)
    return _product((a + b) * up, signs) * down, _product((a - b) * up, signs) * down


@triton.jit
def encode_e4m3(x, TO: tl.constexpr):
    """uint8 codes of float32: by the arch's own conversion, or, where TO ends in bits, by arithmetic."""
    if TO == "fn":
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif TO == "fnuz":
        code = x.to(tl.float8e4b8).to(tl.uint8, bitcast=True)
    else:
        FNUZ: tl.constexpr = TO == "fnuz bits"
        BIAS: tl.constexpr = 8 if FNUZ else 7
        bits = x.to(tl.uint32, bitcast=True)
        # To three bits of mantissa, nearest even; a carry goes into the exponent.
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (127 - BIAS) * 8
        # Below the normals, the sum's last bit is the step: 2^-9, or 2^-10.
        MAGIC: tl.constexpr = 8192.0 if FNUZ else 16384.0
        MAGIC_BITS: tl.constexpr = 0x46000000 if FNUZ else 0x46800000
        small = (tl.abs(x) + MAGIC).to(tl.uint32, bitcast=True) - MAGIC_BITS
        code = tl.where(size < (128 - BIAS) << 23, small, tl.minimum(normal, 0x7F if FNUZ else 0x7E))
        sign = (bits >> 24) & 0x80
        if FNUZ:
            code = tl.where(code == 0, 0, code | sign)
            code = tl.where(x != x, 0x80, code)
        else:
            code = tl.where(x != x, 0x7F, code) | sign
        code = code.to(tl.uint8)
    return code


@triton.jit
def power_of_two_above(x):
    """The least power of two not below each positive, normal float32; infinity stays."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0x7F800000, (bits + 0x7FFFFF) & 0x7F800000, bits).to(tl.float32, bitcast=True)


@triton.jit
def quantize_e4m3(a, b, LIMIT: tl.constexpr, POWER_OF_TWO: tl.constexpr, TO: tl.constexpr):
    """Codes of a and b and the scale [R] of their rows."""
    amax = tl.maximum(tl.max(tl.abs(a), axis=1), tl.max(tl.abs(b), axis=1))
    scale = tl.div_rn(tl.maximum(amax, 1e-4), LIMIT)
    if POWER_OF_TWO:
        scale = power_of_two_above(scale)
        inverse = tl.div_rn(1.0, scale)[:, None]
        a, b = tl.fma(a, inverse, 0.0), tl.fma(b, inverse, 0.0)  # -0.0 becomes +0.0, as below
    else:
        # The correctly rounded quotient in three operations, for a tenth of a division's: a reciprocal, a remainder.
        inverse, divisor = tl.div_rn(1.0, scale)[:, None], -scale[:, None]
        qa, qb = a * inverse, b * inverse
        a = tl.fma(tl.fma(qa, divisor, a), inverse, qa)
        b = tl.fma(tl.fma(qb, divisor, b), inverse, qb)
    return encode_e4m3(a, TO), encode_e4m3(b, TO), scale


@triton.jit
def encode_e2m1(x):
    """int32 codes of float32 of at most 6: nearest, ties to even; NaN is 0."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # To one bit of mantissa; below 2, codes are multiples of 0.5, which is the last bit of a sum with 2^22.
    normal = ((size + 0x1FFFFF + ((size >> 22) & 1)) >> 22) - 252
    small = (tl.abs(x) + 4194304.0).to(tl.int32, bitcast=True) & 7
    code = tl.where(size < 0x40000000, small, normal) | ((bits >> 28) & 8)
    return tl.where(size > 0x7F800000, 0, code)


@triton.jit
def round_e2m1(x):
    """float32 of the same codes."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x1FFFFF + ((size >> 22) & 1)) >> 22) << 22
    small = ((tl.abs(x) + 4194304.0) - 4194304.0).to(tl.int32, bitcast=True)
    rounded = tl.where(size < 0x40000000, small, normal) | (bits ^ size)
    return tl.where(size > 0x7F800000, 0, rounded).to(tl.float32, bitcast=True)


@triton.jit
def decode_e2m1(code):
    """float32 of codes: their bits are a float16's, 2^14 times too small."""
    bits = ((code & 7) << 9) | ((code & 8) << 12)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _fp4_scale(amax):
    """The byte of a block's scale, and the inverse of the scale, which is a power of two."""
    byte = power_of_two_above(tl.div_rn(tl.maximum(amax, 7.052966104933725e-38), 6.0)).to(tl.int32, bitcast=True) >> 23
    inverse = tl.where(byte == 255, 0x7FC00000, (254 - byte) << 23).to(tl.float32, bitcast=True)
    return byte, inverse


@triton.jit
def scale_e2m1(a, b, R: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """a and b over their blocks' scales, [R, blocks of either, channels]; the bytes of those scales, [R, blocks]; the
    blocks' numbers. Interleaved, a and b lie in the same blocks."""
    if INTERLEAVED:
        BLOCKS: tl.constexpr = D // 32
        a, b = tl.reshape(a, [R, BLOCKS, 16]), tl.reshape(b, [R, BLOCKS, 16])
        amax = tl.maximum(tl.max(tl.abs(a), axis=2), tl.max(tl.abs(b), axis=2))
        a_byte, inverse = _fp4_scale(amax)
        a, b = a * inverse[:, :, None], b * inverse[:, :, None]
        b_byte = a_byte
        first = tl.arange(0, BLOCKS)
    else:
        BLOCKS: tl.constexpr = D // 64
        a, b = tl.reshape(a, [R, BLOCKS, 32]), tl.reshape(b, [R, BLOCKS, 32])
        a_byte, a_inverse = _fp4_scale(tl.max(tl.abs(a), axis=2))
        b_byte, b_inverse = _fp4_scale(tl.max(tl.abs(b), axis=2))
        a, b = a * a_inverse[:, :, None], b * b_inverse[:, :, None]
        group = tl.arange(0, BLOCKS) * 32
        first = (group // HALF * (2 * HALF) + group % HALF) // 32
    return a, b, a_byte, b_byte, first


@triton.jit
def fp4_word(a_byte, b_byte, first, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """int32 [R]: the four scale bytes of a row."""
    word = tl.sum(a_byte << (8 * first)[None, :], axis=1)
    if not INTERLEAVED:
        word += tl.sum(b_byte << (8 * first + HALF // 4)[None, :], axis=1)
    return word


@triton.jit
def exponent_scale(code):
    """float32 2^(code - 127) of codes from -22 on, which may be subnormal."""
    bits = tl.where(code > 0, code << 23, 1 << tl.minimum(tl.maximum(22 + code, 0), 22))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def relative_scale(down, SHIFT: tl.constexpr):
    """float32 2^(down + SHIFT): of a block of a key that is converted to e4m3, that far from the key's largest."""
    power = tl.minimum(tl.maximum(down + SHIFT, -126), SHIFT)
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def key_scale(top, broken, SHIFT: tl.constexpr):
    """float32: the scale of a key that is converted, 1 of a key of zeros (top is -1), NaN of a broken one."""
    scale = tl.where(top < 0, 1.0, exponent_scale(top - SHIFT))
    return tl.where(broken, float("nan"), scale)


@triton.jit
def e2m1_words(a, b, R: tl.constexpr, D: tl.constexpr, INTERLEAVED: tl.constexpr):
    """int32 words of eight nibbles, of codes of a and b: interleaved, one [R, D / 8]; else of a and of b,
    [R, D / 16] each, group by group of eight channels."""
    if INTERLEAVED:
        shift = (tl.arange(0, 4) * 8)[None, None, :]
        first = tl.sum(tl.reshape(a | (b << 4), [R, D // 8, 4]) << shift, axis=2)
        second = first
    else:
        shift = (tl.arange(0, 8) * 4)[None, None, :]
        first = tl.sum(tl.reshape(a, [R, D // 16, 8]) << shift, axis=2)
        second = tl.sum(tl.reshape(b, [R, D // 16, 8]) << shift, axis=2)
    return first, second


@triton.jit
def spread(half):
    """int32, a nibble in each byte, of int32 of four nibbles."""
    half = (half | (half << 8)) & 0x00FF00FF
    return (half | (half << 4)) & 0x0F0F0F0F


@triton.jit
def tops(nonzero, byte):
    """Of blocks [R, ...] of keys, whether a part of theirs is not zero and their scale bytes: the largest byte of each
    key's blocks that are not zeros, -1 of none, and how far the lowest of any key's lies above or below it."""
    top = tl.max(tl.where(nonzero, byte, -1), axis=1)
    return top, tl.min(tl.min(tl.where(nonzero, byte - top[:, None], 0), axis=1), axis=0)


@triton.jit
def e4m3_of_e2m1(x, down, lowest, SHIFT: tl.constexpr, TO: tl.constexpr):
    """int32 of four e4m3 codes, of int32 of four e2m1 codes, a byte each; see fp4_to_fp8.

    `down` int32: the exponent of the code's block less that of its key's largest; `lowest`, a scalar: the least."""
    FNUZ: tl.constexpr = SHIFT == 5
    if lowest >= -11:
        # All are normal in e4m3: exponents are added, four bytes at a time. 0.5 alone is subnormal in e2m1.
        size = x & 0x07070707
        some = ((size + 0x07070707) >> 3) & 0x01010101
        normal = ((size + 0x06060606) >> 3) & 0x01010101
        sign = (x << 4) & ((some << 7) if FNUZ else ((x & 0x08080808) << 4))
        codes = (((size + normal - some) << 2) + some * ((down + 12) << 3)) | sign
    else:
        unit = relative_scale(down, SHIFT)
        codes = tl.zeros_like(x)
        for i in tl.static_range(4):
            value = decode_e2m1((x >> (8 * i)) & 0xF) * unit
            codes |= encode_e4m3(value, TO).to(tl.int32) << (8 * i)
    return codes
