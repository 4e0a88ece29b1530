"""LLVM instructions that numba has no name for: 64 comparisons, set bits, memory at any address.

They are inlined into the kernel that uses them, so other files may: the name of the cache folder
covers this file. The vectors are of LLVM's own kind, so every processor gets what it has (AVX-512
compares 16 floats at a time, others 8 or 4), and all compute the same bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

BLOCK = 64  # elements per mask

_FLOAT = ir.FloatType()
_DOUBLE = ir.DoubleType()
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_BLOCK_FLOATS = ir.VectorType(_FLOAT, BLOCK)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, first: Any) -> Any:
    """Address of element `first` of a contiguous array of float32, as a block."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [first]), _BLOCK_FLOATS.as_pointer())


def _mask(builder: Any, block: Any, tau: Any) -> Any:
    """Bit i is set unless |block[i]| < tau; so it is for NaN."""
    name = f"llvm.fabs.v{BLOCK}f32"
    kind = ir.FunctionType(_BLOCK_FLOATS, [_BLOCK_FLOATS])
    size = builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [block])
    undefined = ir.Constant(_BLOCK_FLOATS, ir.Undefined)
    first = builder.insert_element(undefined, tau, ir.Constant(_INT32, 0))
    lanes = ir.Constant(ir.VectorType(_INT32, BLOCK), [0] * BLOCK)
    taus = builder.shuffle_vector(first, undefined, lanes)
    return builder.bitcast(builder.fcmp_unordered(">=", size, taus), _INT64)


@intrinsic
def mask64_ge(_typing: Any, values: Any, first: Any, tau: Any) -> Any:
    """mask64_ge(values, first, tau): which of the 64 values from `first` on are not below tau.

    float32 array, int64, float32 -> uint64; bit i stands for `values[first + i]`. NaN counts as
    not below.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, start, limit = arguments
        pointer = _pointer(context, builder, signature.args[0], array, start)
        return _mask(builder, builder.load(pointer, align=4), limit)

    return types.uint64(values, types.int64, types.float32), generate


@intrinsic
def add_mask64_ge(_typing: Any, added: Any, values: Any, first: Any, tau: Any) -> Any:
    """add_mask64_ge(added, values, first, tau): as mask64_ge of the sum, stored in `values`.

    Two float32 arrays of different memory, int64, float32 -> uint64.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        addend, array, start, limit = arguments
        source = _pointer(context, builder, signature.args[0], addend, start)
        target = _pointer(context, builder, signature.args[1], array, start)
        total = builder.fadd(builder.load(source, align=4), builder.load(target, align=4))
        builder.store(total, target, align=4)
        return _mask(builder, total, limit)

    return types.uint64(added, values, types.int64, types.float32), generate


@intrinsic
def trailing_zeros(_typing: Any, bits: Any) -> Any:
    """trailing_zeros(bits): position of the lowest set bit of a uint64 that is not 0, as int64."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_INT64, [_INT64, ir.IntType(1)])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.cttz.i64")
        return builder.call(function, [arguments[0], ir.Constant(ir.IntType(1), 1)])

    return types.int64(types.uint64), generate


@intrinsic
def population(_typing: Any, bits: Any) -> Any:
    """population(bits): number of set bits of a uint64, as int64."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_INT64, [_INT64])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.ctpop.i64")
        return builder.call(function, [arguments[0]])

    return types.int64(types.uint64), generate


@intrinsic
def mask64_ge_int16(_typing: Any, values: Any, first: Any, limit: Any) -> Any:
    """mask64_ge_int16(values, first, limit): as mask64_ge of whole numbers, signs included.

    int16 array, int64, int16 -> uint64.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, start, bound = arguments
        half = ir.IntType(16)
        block = ir.VectorType(half, BLOCK)
        data = context.make_array(signature.args[0])(context, builder, array).data
        pointer = builder.bitcast(builder.gep(data, [start]), block.as_pointer())
        undefined = ir.Constant(block, ir.Undefined)
        lane = builder.insert_element(undefined, bound, ir.Constant(_INT32, 0))
        lanes = ir.Constant(ir.VectorType(_INT32, BLOCK), [0] * BLOCK)
        bounds = builder.shuffle_vector(lane, undefined, lanes)
        wholes = builder.load(pointer, align=2)
        return builder.bitcast(builder.icmp_signed(">=", wholes, bounds), _INT64)

    return types.uint64(values, types.int64, types.int16), generate


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


@intrinsic
def floats_at(_typing: Any, address: Any) -> Any:
    """floats_at(address): uint64 -> pointer to float32, for `numba.carray`."""
    pointer = types.CPointer(types.float32)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(types.uint64), generate


def _tree(builder: Any, lanes: Any, count: int, join: Any) -> Any:
    """One value of all lanes of a vector: halves are joined until one lane is left."""
    while count > 1:
        count //= 2
        undefined = ir.Constant(lanes.type, ir.Undefined)
        parts = [
            builder.shuffle_vector(
                lanes,
                undefined,
                ir.Constant(ir.VectorType(_INT32, count), list(range(first, first + count))),
            )
            for first in (0, count)
        ]
        lanes = join(*parts)
    return builder.extract_element(lanes, ir.Constant(_INT32, 0))


def _doubles(builder: Any, block: Any, of_magnitudes: bool) -> Any:
    """A block as float64, without signs if asked."""
    if of_magnitudes:
        name = f"llvm.fabs.v{BLOCK}f32"
        kind = ir.FunctionType(_BLOCK_FLOATS, [_BLOCK_FLOATS])
        block = builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [block])
    return builder.fpext(block, ir.VectorType(_DOUBLE, BLOCK))


def _sums(of_magnitudes: bool) -> Any:
    """Code for the sum and the sum of squares of a block less a shift."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, start, shift = arguments
        pointer = _pointer(context, builder, signature.args[0], array, start)
        block = _doubles(builder, builder.load(pointer, align=4), of_magnitudes)
        undefined = ir.Constant(block.type, ir.Undefined)
        first = builder.insert_element(undefined, shift, ir.Constant(_INT32, 0))
        zeros = ir.Constant(ir.VectorType(_INT32, BLOCK), [0] * BLOCK)
        moved = builder.fsub(block, builder.shuffle_vector(first, undefined, zeros))
        total = _tree(builder, moved, BLOCK, builder.fadd)
        squares = _tree(builder, builder.fmul(moved, moved), BLOCK, builder.fadd)
        return context.make_tuple(builder, signature.return_type, (total, squares))

    return generate


@intrinsic
def sums64(_typing: Any, values: Any, first: Any, shift: Any) -> Any:
    """sums64(values, first, shift): of 64 values less a shift, their sum and that of squares.

    float32 array, int64, float64 -> two float64.
    """
    kinds = types.UniTuple(types.float64, 2)
    return kinds(values, types.int64, types.float64), _sums(of_magnitudes=False)


@intrinsic
def magnitude_sums64(_typing: Any, values: Any, first: Any, shift: Any) -> Any:
    """magnitude_sums64(values, first, shift): as `sums64`, of the values without their signs."""
    kinds = types.UniTuple(types.float64, 2)
    return kinds(values, types.int64, types.float64), _sums(of_magnitudes=True)


@intrinsic
def log_parts64(_typing: Any, values: Any, first: Any) -> Any:
    """log_parts64(values, first): the product of 64 magnitudes, zeros left out, as m * 2 ** e.

    float32 array, int64 -> m float64, 1 to 2 ** 64, and e int64.
    """
    kinds = types.Tuple((types.float64, types.int64))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, start = arguments
        pointer = _pointer(context, builder, signature.args[0], array, start)
        sizes = _doubles(builder, builder.load(pointer, align=4), of_magnitudes=True)
        ones = ir.Constant(sizes.type, [1.0] * BLOCK)
        is_zero = builder.fcmp_ordered("==", sizes, ir.Constant(sizes.type, [0.0] * BLOCK))
        words = ir.VectorType(_INT64, BLOCK)
        bits = builder.bitcast(builder.select(is_zero, ones, sizes), words)
        exponents = builder.lshr(bits, ir.Constant(words, [52] * BLOCK))
        fractions = builder.and_(bits, ir.Constant(words, [(1 << 52) - 1] * BLOCK))
        mantissas = builder.or_(fractions, ir.Constant(words, [1023 << 52] * BLOCK))
        product = _tree(builder, builder.bitcast(mantissas, sizes.type), BLOCK, builder.fmul)
        total = _tree(builder, exponents, BLOCK, builder.add)
        exponent = builder.sub(total, ir.Constant(_INT64, 1023 * BLOCK))
        return context.make_tuple(builder, signature.return_type, (product, exponent))

    return kinds(values, types.int64), generate


@intrinsic
def fused_multiply_add(_typing: Any, left: Any, right: Any, added: Any) -> Any:
    """fused_multiply_add(left, right, added): left * right + added, rounded once; float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    kinds = types.float32
    return kinds(kinds, kinds, kinds), generate
