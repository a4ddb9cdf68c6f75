# mypy: disable-error-code="no-untyped-call"
"""Loops that Numba compiles for one CPU core: how they are compiled, and how they read and write elements.

Invariants:
    - No flag lets the compiler assume that there are no infinities and no values that are not numbers.
    - bfloat16 goes in and out as its bits, uint16; arithmetic is in float32.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

_WORD = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()


def compiled(function: Any) -> Any:
    """The function in machine code, which runs without Python's lock and is kept on disk where that can be written."""
    options: dict[str, Any] = {
        "nogil": True,
        "fastmath": {"reassoc", "contract", "arcp", "nsz"},
        "error_model": "numpy",
    }
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        return numba.njit(**options)(function)


def elements(tensor: torch.Tensor) -> Any:
    """The elements as loops take them: bfloat16 as its bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def _floats(builder: Any, value: Any) -> Any:
    """Elements, or a vector of them, as float32."""
    if "float" in str(value.type):
        return value
    words = _like(value.type, _WORD)
    return builder.bitcast(builder.shl(builder.zext(value, words), _constant(words, 16)), _like(words, ir.FloatType()))


def _rounded(builder: Any, value: Any) -> Any:
    """float32, or a vector of them, as the bits of bfloat16: rounded to the nearest, a half to even."""
    words = _like(value.type, _WORD)
    bits = builder.bitcast(value, words)
    is_odd = builder.and_(builder.lshr(bits, _constant(words, 16)), _constant(words, 1))
    up = builder.lshr(builder.add(builder.add(bits, _constant(words, 0x7FFF)), is_odd), _constant(words, 16))
    kept = builder.select(builder.fcmp_unordered("uno", value, value), _constant(words, 0x7FC0), up)
    return builder.trunc(kept, _like(words, ir.IntType(16)))


def _like(shaped: Any, kind: Any) -> Any:
    """`kind`, or as long a vector of it as `shaped` is."""
    return ir.VectorType(kind, shaped.count) if isinstance(shaped, ir.VectorType) else kind


def _constant(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def _widen(_: Any, value: Any) -> Any:
    """float32 of an element."""
    return numba.types.float32(value), lambda _context, builder, _signature, args: _floats(builder, args[0])


def _narrow(_: Any, value: Any, array: Any) -> Any:
    """An element of ``array`` of a float32."""
    if array.dtype == numba.types.float32:
        return numba.types.float32(value, array), lambda _context, _builder, _signature, args: args[0]
    return numba.types.uint16(value, array), lambda _context, builder, _signature, args: _rounded(builder, args[0])


def _power(_: Any, exponent: Any) -> Any:
    """2 ** exponent, of an int32 from -126 to 127."""

    def power(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.shl(builder.add(args[0], ir.Constant(_WORD, 127)), ir.Constant(_WORD, 23))
        return builder.bitcast(bits, ir.FloatType())

    return numba.types.float32(numba.types.int32), power


as_float: Any = intrinsic(_widen)
as_element: Any = intrinsic(_narrow)
_power_of_two: Any = intrinsic(_power)


def _exp2(t: Any) -> Any:
    """2 ** t to float32's precision, with t kept within -126 and 126."""
    if t < np.float32(-126.0):
        t = np.float32(-126.0)
    if t > np.float32(126.0):
        t = np.float32(126.0)
    whole = np.int32(t + np.float32(192.5)) - np.int32(192)  # the nearest integer: what is cast is positive
    f = t - np.float32(whole)
    # Taylor's series of 2 ** f for |f| <= 0.5.
    p = np.float32(1.5403530e-4)
    p = p * f + np.float32(1.3333558e-3)
    p = p * f + np.float32(9.6181291e-3)
    p = p * f + np.float32(5.5504109e-2)
    p = p * f + np.float32(2.4022651e-1)
    p = p * f + np.float32(6.9314718e-1)
    return (p * f + np.float32(1.0)) * _power_of_two(np.int32(whole))


exp2 = compiled(_exp2)


def _start(context: Any, builder: Any, kind: Any, array: Any, indices: Any) -> Any:
    """The address of an element of an array, without a view, which would count references; missing indices are 0."""
    given = make_array(kind)(context, builder, array)
    strides = cgutils.unpack_tuple(builder, given.strides, kind.ndim)
    steps = [builder.mul(one, stride) for one, stride in zip(indices, strides, strict=False)]
    data = builder.gep(builder.bitcast(given.data, _BYTES), [functools.reduce(builder.add, steps)])
    return builder.bitcast(data, given.data.type)


def _ahead(_: Any, array: Any, block: Any, row: Any) -> Any:
    """Asks for the memory of ``array[block, row]`` ahead of its use."""

    def ask(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        given = make_array(kind)(context, builder, args[0])
        start = builder.bitcast(_start(context, builder, kind, args[0], args[1:]), _BYTES)
        size = functools.reduce(builder.mul, cgutils.unpack_tuple(builder, given.shape, kind.ndim)[2:], given.itemsize)
        flags = [ir.Constant(_WORD, flag) for flag in (0, 3, 1)]  # to read, into every cache, data
        kinds = ir.FunctionType(ir.VoidType(), [_BYTES, _WORD, _WORD, _WORD])
        prefetch = cgutils.get_or_insert_function(builder.module, kinds, "llvm.prefetch.p0")
        with cgutils.for_range_slice(builder, ir.Constant(size.type, 0), size, ir.Constant(size.type, 64)) as (at, _n):
            builder.call(prefetch, [builder.gep(start, [at]), *flags])
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.int64, numba.types.int64), ask


ask_for: Any = intrinsic(_ahead)

TILE = (4, 32)
"""Rows and columns that ``multiply`` computes."""


def _product(_: Any, a: Any, b: Any, c: Any, column: Any, depth: Any) -> Any:
    """Writes a[:4, :depth] @ b[:depth, column:column + 32] to the same columns of c; all float32 with dense rows."""

    def multiply(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        index, vector = args[3].type, ir.VectorType(ir.FloatType(), 16)
        lanes = range(0, TILE[1], vector.count)

        def place(which: int, row: Any, first: Any, kind: Any) -> Any:
            start = _start(context, builder, signature.args[which], args[which], (row, first))
            return builder.bitcast(start, kind.as_pointer())

        sums = [[cgutils.alloca_once(builder, vector) for _ in lanes] for _ in range(TILE[0])]
        for one in itertools.chain(*sums):
            builder.store(ir.Constant(vector, [0.0] * vector.count), one)
        columns = [builder.add(args[3], ir.Constant(index, lane)) for lane in lanes]
        with cgutils.for_range(builder, args[4]) as loop:
            wide = [builder.load(place(1, loop.index, first, vector), align=4) for first in columns]
            for row, held in enumerate(sums):
                one = builder.load(place(0, ir.Constant(index, row), loop.index, ir.FloatType()))
                alone = builder.insert_element(ir.Constant(vector, ir.Undefined), one, ir.Constant(_WORD, 0))
                each = builder.shuffle_vector(alone, alone, _constant(ir.VectorType(_WORD, vector.count), 0))
                for x, total in zip(wide, held, strict=True):
                    product = builder.fmul(each, x, flags=("contract",))
                    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
        for row, held in enumerate(sums):
            for first, total in zip(columns, held, strict=True):
                builder.store(builder.load(total), place(2, ir.Constant(index, row), first, vector), align=4)
        return context.get_dummy_value()

    return numba.types.void(a, b, c, numba.types.int64, numba.types.int64), multiply


multiply: Any = intrinsic(_product)


def _turn(_: Any, target: Any, to: Any, source: Any, at: Any, cos: Any, sin: Any, position: Any, half: Any) -> Any:
    """Writes source, from place ``at``, to target, from place ``to``, its first 2 * half elements rotated by cos[position]."""

    def turn(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds, half = signature.args, args[7]
        to, at = (cgutils.unpack_tuple(builder, args[place]) for place in (1, 3))
        row = (args[6],)
        starts = [
            _start(context, builder, kinds[place], args[place], indices)
            for place, indices in ((0, to), (2, at), (4, row), (5, row))
        ]

        def some(begin: Any, end: Any, count: int) -> None:
            with cgutils.for_range_slice(builder, begin, end, ir.Constant(half.type, count)) as (first, _n):
                second = builder.add(first, half)

                def place(which: int, at: Any) -> Any:
                    data = builder.gep(starts[which], [at])
                    return builder.bitcast(data, ir.VectorType(data.type.pointee, count).as_pointer())

                def read(which: int, at: Any) -> Any:
                    return _floats(builder, builder.load(place(which, at), align=2))

                def write(value: Any, at: Any) -> None:
                    given = value if kinds[0].dtype == numba.types.float32 else _rounded(builder, value)
                    builder.store(given, place(0, at), align=2)

                x, y, c, s = read(1, first), read(1, second), read(2, first), read(3, first)
                write(builder.fsub(builder.fmul(x, c), builder.fmul(y, s)), first)
                write(builder.fadd(builder.fmul(y, c), builder.fmul(x, s)), second)

        whole = builder.and_(half, ir.Constant(half.type, -8))
        some(ir.Constant(half.type, 0), whole, 8)
        some(whole, half, 1)
        return context.get_dummy_value()

    return numba.types.void(target, to, source, at, cos, sin, numba.types.int64, numba.types.int64), turn


rotate: Any = intrinsic(_turn)
