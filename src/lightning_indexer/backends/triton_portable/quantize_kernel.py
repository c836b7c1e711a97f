"""Device functions of the kernels that write and gather keys and prepare queries.

Rows of D channels are held as pairs, a and b [R, D / 2] float32 each: the two channels that RoPE turns. Interleaved,
pair j is channels (2j, 2j + 1); else channels come in groups of 2 * HALF, and pair j is channel
j // HALF * 2 * HALF + j % HALF and that HALF further. So no step moves a channel from one lane to another, but the
Hadamard rotation.
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
    if INTERLEAVED:
        x = tl.load(rows[:, None] + tl.arange(0, D)[None, :], mask=mask[:, None], other=0.0)
        a, b = tl.split(tl.reshape(x, [R, D // 2, 2]))
    else:
        first = rows[:, None] + first_channels(D, HALF)[None, :]
        a = tl.load(first, mask=mask[:, None], other=0.0)
        b = tl.load(first + HALF, mask=mask[:, None], other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _vector_pairs(pointer, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """A vector of D channels, as the pairs of a row."""
    if INTERLEAVED:
        a, b = tl.split(tl.reshape(tl.load(pointer + tl.arange(0, D)), [D // 2, 2]))
    else:
        first = first_channels(D, HALF)
        a, b = tl.load(pointer + first), tl.load(pointer + first + HALF)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def layer_norm(a, b, weight_ptr, bias_ptr, eps, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    mean = (tl.sum(a, axis=1) + tl.sum(b, axis=1)) * (1.0 / D)
    a -= mean[:, None]
    b -= mean[:, None]
    variance = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) * (1.0 / D)
    rest = tl.rsqrt(variance + eps)
    a_weight, b_weight = _vector_pairs(weight_ptr, D, HALF, INTERLEAVED)
    a = a * rest[:, None] * a_weight[None, :]
    b = b * rest[:, None] * b_weight[None, :]
    if bias_ptr is not None:
        a_bias, b_bias = _vector_pairs(bias_ptr, D, HALF, INTERLEAVED)
        a += a_bias[None, :]
        b += b_bias[None, :]
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
def _hadamard_half(x, R: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr):
    """[R, W] times the Hadamard matrix of W: a stage takes the lowest bit of the channel and makes it the highest."""
    for _ in tl.static_range(STAGES):
        even, odd = tl.split(tl.reshape(x, [R, W // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), [0, 2, 1]), [R, W])
    return x


@triton.jit
def hadamard(a, b, R: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr):
    """D is 2 to the STAGES. The first stage is that of the bit in which a pair's channels differ."""
    SCALE: tl.constexpr = D**-0.5
    a, b = (a + b) * SCALE, (a - b) * SCALE
    return _hadamard_half(a, R, D // 2, STAGES - 1), _hadamard_half(b, R, D // 2, STAGES - 1)


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
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    sign = (x.to(tl.uint32, bitcast=True) >> 28).to(tl.int32) & 8
    return tl.where(x == x, code | sign, 0)


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
def quantize_e2m1(a, b, R: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Codes of a and b, int32; the bytes of the scales of a's and of b's blocks, [R, blocks of either]; those blocks'
    numbers. Interleaved, a and b lie in the same blocks."""
    if INTERLEAVED:
        BLOCKS: tl.constexpr = D // 32
        a, b = tl.reshape(a, [R, BLOCKS, 16]), tl.reshape(b, [R, BLOCKS, 16])
        amax = tl.maximum(tl.max(tl.abs(a), axis=2), tl.max(tl.abs(b), axis=2))
        a_byte, inverse = _fp4_scale(amax)
        a_code, b_code = encode_e2m1(a * inverse[:, :, None]), encode_e2m1(b * inverse[:, :, None])
        b_byte = a_byte
        first = tl.arange(0, BLOCKS)
    else:
        BLOCKS: tl.constexpr = D // 64
        a, b = tl.reshape(a, [R, BLOCKS, 32]), tl.reshape(b, [R, BLOCKS, 32])
        a_byte, a_inverse = _fp4_scale(tl.max(tl.abs(a), axis=2))
        b_byte, b_inverse = _fp4_scale(tl.max(tl.abs(b), axis=2))
        a_code, b_code = encode_e2m1(a * a_inverse[:, :, None]), encode_e2m1(b * b_inverse[:, :, None])
        group = tl.arange(0, BLOCKS) * 32
        first = (group // HALF * (2 * HALF) + group % HALF) // 32
    return a_code, b_code, a_byte, b_byte, first


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
def relative_scale(byte, top, SHIFT: tl.constexpr):
    """float32 2^(byte - top + SHIFT): of a block of a key that is converted to e4m3."""
    down = tl.minimum(tl.maximum(byte - top + SHIFT, -126), SHIFT)
    return ((down + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def key_scale(top, broken, SHIFT: tl.constexpr):
    """float32: the scale of a key that is converted, 1 of a key of zeros (top is -1), NaN of a broken one."""
    scale = tl.where(top < 0, 1.0, exponent_scale(top - SHIFT))
    return tl.where(broken, float("nan"), scale)
