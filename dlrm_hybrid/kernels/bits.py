"""What kernels of several files share: bits of floats, 64 comparisons at once, memory anywhere.

All of it is inlined into the kernel that uses it. The vectors are of LLVM's own kind, so every
processor gets what it has (AVX-512 compares 16 floats at a time, others 8 or 4).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from dlrm_hybrid.arrays import Bytes

BLOCK = 64  # elements per mask
MAGNITUDE = np.uint32(0x7FFFFFFF)  # of a float32's bits, all but its sign
# As a threshold it keeps just the zeros out.
SMALLEST = np.float32(1e-45)
LARGEST = np.float32(3.4028235e38)
GAMMA = np.uint64(0x9E3779B97F4A7C15)

_SIGN, _INFINITY, _QUIET = np.uint32(0x80000000), np.uint32(0x7F800000), np.uint32(0x00400000)
_ONE, _SHIFT = np.uint32(1), np.uint32(16)
# What bfloat16 drops of a float32's fraction, half of that less one, and its largest number.
_DROPPED, _HALF, _LARGEST = np.uint32(0xFFFF), np.uint32(0x7FFF), np.uint32(0x7F7F0000)

_FLOAT = ir.FloatType()
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_NOT_ZERO = ir.Constant(ir.IntType(1), 1)


@register_jitable
def mix64(x: np.uint64) -> np.uint64:
    """Bijective mix of 64 bits: of multiples of GAMMA, SplitMix64 (Steele et al., OOPSLA 2014)."""
    x = np.uint64((x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9))
    x = np.uint64((x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB))
    return np.uint64(x ^ (x >> np.uint64(31)))


@register_jitable
def nearest_bfloat16(word: np.uint32) -> np.uint32:
    """Bits of the bfloat16, as a float32, that is nearest to the float32 with these bits.

    Ties go to the even one; what is finite stays finite, NaN stays NaN. No branches.
    """
    size = np.uint32(word & MAGNITUDE)
    even = np.uint32(np.uint32(size >> _SHIFT) & _ONE)
    rounded = np.uint32(np.uint32(size + np.uint32(_HALF + even)) & ~_DROPPED)
    rounded = min(rounded, _LARGEST)
    special = np.uint32(np.uint32(size | (_QUIET if size > _INFINITY else 0)) & ~_DROPPED)
    return np.uint32((word & _SIGN) | (special if size >= _INFINITY else rounded))


def _load(context: Any, builder: Any, kinds: Any, array: Any, first: Any, lane: Any) -> Any:
    """Address of element `first` of a contiguous array, as a block of its elements."""
    data = context.make_array(kinds)(context, builder, array).data
    block = ir.VectorType(lane, BLOCK)
    return builder.bitcast(builder.gep(data, [first]), block.as_pointer())


def _repeated(builder: Any, value: Any, lane: Any) -> Any:
    """A block of one value."""
    block = ir.VectorType(lane, BLOCK)
    undefined = ir.Constant(block, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_INT32, 0))
    lanes = ir.Constant(ir.VectorType(_INT32, BLOCK), [0] * BLOCK)
    return builder.shuffle_vector(first, undefined, lanes)


def _mask(builder: Any, block: Any, tau: Any) -> Any:
    """Bit i is set unless |block[i]| < tau; so it is for NaN."""
    kind = ir.FunctionType(block.type, [block.type])
    name = f"llvm.fabs.v{BLOCK}f32"
    size = builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [block])
    return builder.bitcast(
        builder.fcmp_unordered(">=", size, _repeated(builder, tau, _FLOAT)), _INT64
    )


@intrinsic
def mask64_ge(_typing: Any, values: Any, first: Any, tau: Any) -> Any:
    """mask64_ge(values, first, tau): which of the 64 values from `first` on are not below tau.

    float32 array, int64, float32 -> uint64; bit i stands for `values[first + i]`. NaN counts as
    not below.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, start, limit = arguments
        pointer = _load(context, builder, signature.args[0], array, start, _FLOAT)
        return _mask(builder, builder.load(pointer, align=4), limit)

    return types.uint64(values, types.int64, types.float32), generate


@intrinsic
def add_mask64_ge(_typing: Any, added: Any, values: Any, first: Any, tau: Any) -> Any:
    """add_mask64_ge(added, values, first, tau): as mask64_ge of the sum, stored in `values`.

    Two float32 arrays of different memory, int64, float32 -> uint64.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        addend, array, start, limit = arguments
        source = _load(context, builder, signature.args[0], addend, start, _FLOAT)
        target = _load(context, builder, signature.args[1], array, start, _FLOAT)
        total = builder.fadd(builder.load(source, align=4), builder.load(target, align=4))
        builder.store(total, target, align=4)
        return _mask(builder, total, limit)

    return types.uint64(added, values, types.int64, types.float32), generate


@intrinsic
def mask64_ge_int16(_typing: Any, values: Any, first: Any, limit: Any) -> Any:
    """mask64_ge_int16(values, first, limit): as mask64_ge of integers, signs included.

    int16 array, int64, int16 -> uint64.
    """
    half = ir.IntType(16)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, start, bound = arguments
        pointer = _load(context, builder, signature.args[0], array, start, half)
        bounds = _repeated(builder, bound, half)
        integers = builder.load(pointer, align=2)
        return builder.bitcast(builder.icmp_signed(">=", integers, bounds), _INT64)

    return types.uint64(values, types.int64, types.int16), generate


def _call(builder: Any, name: str, *arguments: Any) -> Any:
    """Call an intrinsic of LLVM on 64 bits."""
    kind = ir.FunctionType(_INT64, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


@intrinsic
def trailing_zeros(_typing: Any, bits: Any) -> Any:
    """trailing_zeros(bits): index of the lowest set bit of a uint64 that is not 0, as int64."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _call(builder, "llvm.cttz.i64", *arguments, _NOT_ZERO)

    return types.int64(types.uint64), generate


@intrinsic
def highest_bit(_typing: Any, bits: Any) -> Any:
    """highest_bit(bits): index of the highest set bit of a uint64 that is not 0, as int64."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        zeros = _call(builder, "llvm.ctlz.i64", *arguments, _NOT_ZERO)
        return builder.sub(ir.Constant(_INT64, 63), zeros)

    return types.int64(types.uint64), generate


@intrinsic
def population(_typing: Any, bits: Any) -> Any:
    """population(bits): number of set bits of a uint64, as int64."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _call(builder, "llvm.ctpop.i64", *arguments)

    return types.int64(types.uint64), generate


@intrinsic
def load64(_typing: Any, data: Any, at: Any) -> Any:
    """load64(data, at): bytes `at` to `at + 8` as uint64, at any address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = builder.bitcast(builder.gep(start, [arguments[1]]), _INT64.as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(data, types.int64), generate


@intrinsic
def store64(_typing: Any, data: Any, at: Any, word: Any) -> Any:
    """store64(data, at, word): the opposite of `load64`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = builder.bitcast(builder.gep(start, [arguments[1]]), _INT64.as_pointer())
        builder.store(arguments[2], pointer, align=1)
        return context.get_dummy_value()

    return types.void(data, types.int64, types.uint64), generate


@register_jitable
def tail64(data: Bytes, at: int) -> np.uint64:
    """As `load64`, with zeros for bytes behind the end."""
    word = np.uint64(0)
    for byte in range(at, min(at + 8, data.size)):
        word |= np.uint64(data[byte]) << np.uint64(8 * (byte - at))
    return word


@intrinsic
def floats_at(_typing: Any, address: Any) -> Any:
    """floats_at(address): uint64 -> pointer to float32, for `numba.carray`."""
    pointer = types.CPointer(types.float32)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(types.uint64), generate


@intrinsic
def fused_multiply_add(_typing: Any, left: Any, right: Any, added: Any) -> Any:
    """fused_multiply_add(left, right, added): left * right + added, rounded once; float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    kinds = types.float32
    return kinds(kinds, kinds, kinds), generate


@intrinsic
def address_of(_typing: Any, array: Any) -> Any:
    """address_of(array): uint64 of a contiguous array's first element.

    An array that is handed to a function is counted as in use, which takes longer than to read a
    symbol; an address is not. The array must outlive it.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(start, _INT64)

    return types.uint64(array), generate


@intrinsic
def load16_at(_typing: Any, address: Any) -> Any:
    """load16_at(address): the two bytes there as uint64."""
    half = ir.IntType(16)

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], half.as_pointer())
        return builder.zext(builder.load(pointer, align=1), _INT64)

    return types.uint64(types.uint64), generate


@intrinsic
def store32_at(_typing: Any, address: Any, word: Any) -> Any:
    """store32_at(address, word): the low four bytes of a uint64."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _INT32.as_pointer())
        builder.store(builder.trunc(arguments[1], _INT32), pointer, align=1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate
