"""Matrix products of few rows, as LLVM is told to compile them: the inner loops of compiled_layers.

A weight [O, I] is read as it is stored, once, four outputs at a time; up to six rows of x stay beside it in registers.
Every number of the result is one sum in one order, whatever the rows and columns computed with it: a row has the same
bits in any company, and neither padding nor a copy of the weight is needed. While one block is multiplied, the memory
two blocks ahead is asked for in the order of its addresses, which the processor's own prefetcher then runs before.

For processors with AVX-512: fp32, and bfloat16 where `vdpbf16ps` exists. See `supported`. Where bfloat16 has matrix
registers, whole products go through those (compiled_matrix).

Legend: R rows, I inputs, O outputs, all addresses and strides in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from docklands.kernels import compiled_matrix
from docklands.kernels.compiled_cache import njit
from docklands.kernels.compiled_processor import has, matrix_registers

LANES = 16
"""fp32 numbers of a vector register."""
ROWS = 6
ACROSS = 4  # outputs at a time
BLOCK_ROWS = 96  # rows that stay in a core's second cache while a weight passes
AHEAD = 2 * ACROSS  # rows of the weight that are asked for before they are needed

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_WIDE = ir.VectorType(_F32, LANES)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def __str__(self) -> str:
        return "bfloat"


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


@cache
def supported(half: bool) -> bool:
    """Whether this machine runs the products of fp32, or (half) of bfloat16."""
    if not half:
        return has("avx512f")
    typed = llvm.llvm_version_info[0] >= 16  # from then on the instruction's intrinsic takes bfloat
    return typed and has("avx512bf16")


def fits(inputs: int, outputs: int, half: bool) -> bool:
    """Whether a weight of this shape can be multiplied with."""
    return inputs % (2 * LANES if half else LANES) == 0 and outputs >= ACROSS


def _pick(builder: Any, x: Any, y: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, len(order)), order))


def _four_sums(builder: Any, sums: list[Any]) -> Any:
    """Four vectors -> their four totals, each added up in the same order."""

    def fold(x: Any, y: Any, low: tuple[int, ...], high: tuple[int, ...]) -> Any:
        parts = []
        for order in (low, high):  # inside each quarter of the register; from 4 on: of y
            places = [quarter + (i if i < 4 else i - 4 + LANES) for quarter in range(0, LANES, 4) for i in order]
            parts.append(_pick(builder, x, y, places))
        return builder.fadd(*parts)

    first = fold(sums[0], sums[1], (0, 4, 1, 5), (2, 6, 3, 7))
    second = fold(sums[2], sums[3], (0, 4, 1, 5), (2, 6, 3, 7))
    total, size = fold(first, second, (0, 1, 4, 5), (2, 3, 6, 7)), LANES
    while size > ACROSS:
        size //= 2
        halves = [_pick(builder, total, total, list(range(at, at + size))) for at in (0, size)]
        total = builder.fadd(*halves)
    return total


class _Code:
    """Emits one tile: `rows` rows of x times four rows of the weight."""

    def __init__(self, builder: Any, rows: int, half: bool) -> None:
        self.b, self.rows, self.half = builder, rows, half
        self.kind = _PAIRS if half else _WIDE
        module, void = builder.module, ir.VoidType()
        name = "llvm.x86.avx512bf16.dpbf16ps.512" if half else f"llvm.fma.v{LANES}f32"
        self._multiply = module.declare_intrinsic(name, (), ir.FunctionType(_WIDE, [_WIDE, self.kind, self.kind]))
        plain = ir.FunctionType(_WIDE, [_WIDE] * 3)
        self._add = module.declare_intrinsic(f"llvm.fma.v{LANES}f32", (), plain)
        asked = ir.FunctionType(void, [_I8.as_pointer(), _I32, _I32, _I32])
        self._prefetch = module.declare_intrinsic("llvm.prefetch.p0", (), asked)

    def at(self, base: Any, offset: Any, kind: Any) -> Any:
        return self.b.inttoptr(self.b.add(base, offset), kind.as_pointer())

    def add_product(self, total: Any, x: Any, w: Any) -> Any:
        return self.b.call(self._multiply, [total, x, w] if self.half else [x, w, total])

    def ask(self, base: Any, at: Any) -> None:
        """The next four lines of memory from base + at on, into the second cache."""
        for line in range(4):
            place = self.at(self.b.add(base, at), _I64(64 * line), _I8)
            self.b.call(self._prefetch, [place, _I32(0), _I32(2), _I32(1)])

    def tile(self, args: Any) -> None:
        """args: x, weight, bytes of a row of either, out, its stride, bytes ahead."""
        b = self.b
        x, w, size, out, out_stride, ahead = args
        before, loop, done = b.block, b.append_basic_block("inputs"), b.append_basic_block("sums")
        x_rows = [b.add(x, b.mul(size, _I64(row))) for row in range(self.rows)]
        w_rows = [b.add(w, b.mul(size, _I64(row))) for row in range(ACROSS)]
        far = b.add(w, ahead)
        b.branch(loop)
        b.position_at_end(loop)
        at = b.phi(_I64)
        sums = [b.phi(_WIDE) for _ in range(self.rows * ACROSS)]
        weights = [b.load(self.at(row, at, self.kind), align=2) for row in w_rows]
        self.ask(far, b.mul(at, _I64(ACROSS)))
        grown = []
        for row in range(self.rows):
            numbers = b.load(self.at(x_rows[row], at, self.kind), align=2)
            for i in range(ACROSS):
                grown.append(self.add_product(sums[row * ACROSS + i], numbers, weights[i]))
        following = b.add(at, _I64(64))
        at.add_incoming(_I64(0), before)
        at.add_incoming(following, loop)
        for total, more in zip(sums, grown):
            total.add_incoming(ir.Constant(_WIDE, [0.0] * LANES), before)
            total.add_incoming(more, loop)
        b.cbranch(b.icmp_signed("<", following, size), loop, done)
        b.position_at_end(done)
        for row in range(self.rows):
            four = _four_sums(b, grown[row * ACROSS : (row + 1) * ACROSS])
            b.store(four, self.at(out, b.mul(out_stride, _I64(row)), ir.VectorType(_F32, ACROSS)), align=4)

    def weigh(self, vectors: int, args: Any) -> None:
        """args: weights, stride; values, stride; count; out, stride. Rows of out, `vectors` registers wide, grow by the
        weighted sum of `count` rows of values.
        """
        b = self.b
        weights, w_stride, values, v_stride, count, out, out_stride = args
        before, loop, done = b.block, b.append_basic_block("tokens"), b.append_basic_block("stored")
        places = [
            self.at(b.add(out, b.mul(out_stride, _I64(row))), _I64(64 * i), _WIDE)
            for row in range(self.rows)
            for i in range(vectors)
        ]
        old = [b.load(place, align=4) for place in places]
        w_rows = [b.add(weights, b.mul(w_stride, _I64(row))) for row in range(self.rows)]
        b.branch(loop)
        b.position_at_end(loop)
        at = b.phi(_I64)
        sums = [b.phi(_WIDE) for _ in places]
        row_at = b.add(values, b.mul(v_stride, at))
        numbers = [self._wide(row_at, i) for i in range(vectors)]
        grown = []
        for row in range(self.rows):
            weight = b.load(self.at(w_rows[row], b.mul(at, _I64(4)), _F32))
            first = b.insert_element(ir.Constant(_WIDE, ir.Undefined), weight, _I32(0))
            all_lanes = _pick(b, first, first, [0] * LANES)
            for i in range(vectors):
                grown.append(b.call(self._add, [all_lanes, numbers[i], sums[row * vectors + i]]))
        following = b.add(at, _I64(1))
        at.add_incoming(_I64(0), before)
        at.add_incoming(following, loop)
        for total, start, more in zip(sums, old, grown):
            total.add_incoming(start, before)
            total.add_incoming(more, loop)
        b.cbranch(b.icmp_signed("<", following, count), loop, done)
        b.position_at_end(done)
        for place, total in zip(places, grown):
            b.store(total, place, align=4)

    def _wide(self, base: Any, i: int) -> Any:
        """The i-th register of numbers from `base` on, in fp32."""
        if not self.half:
            return self.b.load(self.at(base, _I64(64 * i), _WIDE), align=4)
        bits = self.b.load(self.at(base, _I64(32 * i), ir.VectorType(ir.IntType(16), LANES)), align=2)
        wide = ir.VectorType(_I32, LANES)
        return self.b.bitcast(self.b.shl(self.b.zext(bits, wide), ir.Constant(wide, [16] * LANES)), _WIDE)


def _compiled(function: Any, name: str) -> Any:
    """Under a name of its own: two functions of one name and signature, each kept on disk inside its caller's code by
    another process, would be taken for one when both are loaded.
    """
    function.__name__ = function.__qualname__ = name
    return njit(function, inline="never")


def _inner(rows: int, emit: Callable[[_Code, Any], None], half: bool, count: int) -> Any:
    """An intrinsic of one tuple of `count` whole numbers."""

    def inner(context: Any, numbers: Any) -> Any:
        def code(target: Any, builder: Any, signature: Any, args: Any) -> Any:
            emit(_Code(builder, rows, half), cgutils.unpack_tuple(builder, args[0]))
            return target.get_dummy_value()

        return types.void(types.UniTuple(types.int64, count)), code

    return intrinsic(inner)


def _by_rows(emit: Callable[[_Code, Any], None], half: bool, count: int, name: str) -> Any:
    """(rows, numbers) -> the tile of that many rows."""
    one, two, three, four, five, six = (_inner(rows, emit, half, count) for rows in range(1, ROWS + 1))

    def tiles(rows: Any, numbers: Any) -> None:
        if rows == 6:
            six(numbers)
        elif rows == 5:
            five(numbers)
        elif rows == 4:
            four(numbers)
        elif rows == 3:
            three(numbers)
        elif rows == 2:
            two(numbers)
        else:
            one(numbers)

    return _compiled(tiles, name)


def _weighing(vectors: int, half: bool) -> Any:
    return _by_rows(lambda code, args: code.weigh(vectors, args), half, 7, f"weigh_{vectors}_{half}")


_PRODUCTS = {half: _by_rows(_Code.tile, half, 6, f"tiles_{half}") for half in (False, True)}
_WEIGHINGS = {half: (_weighing(4, half), _weighing(1, half)) for half in (False, True)}


def tiles_of(like: Any, rows: Any, numbers: Any) -> None:
    """numbers = (x, weight, bytes of a row of either, out, its stride, bytes ahead): 1 to ROWS rows of x, like `like`,
    times four of the weight -> fp32 at out.
    """


@overload(tiles_of)
def _tiles_of(like: Any, rows: Any, numbers: Any) -> Any:
    product = _PRODUCTS[like.dtype == types.uint16]

    def run(like: Any, rows: Any, numbers: Any) -> None:
        product(rows, numbers)

    return run


def add_weighted(like: Any, rows: Any, width: Any, numbers: Any) -> None:
    """numbers = (weights, stride, values, count, out): out fp32 [rows, width] += weights fp32 [rows, count] @ values
    [count, width] in like's dtype.
    """


@overload(add_weighted)
def _add_weighted(like: Any, rows: Any, width: Any, numbers: Any) -> Any:
    half = like.dtype == types.uint16
    wide, narrow = _WEIGHINGS[half]
    size = 2 if half else 4

    def run(like: Any, rows: Any, width: Any, numbers: Any) -> None:
        weights, stride, values, count, out = numbers
        at = 0
        while at + 4 * LANES <= width:
            wide(rows, (weights, stride, values + at * size, width * size, count, out + at * 4, width * 4))
            at += 4 * LANES
        while at < width:
            narrow(rows, (weights, stride, values + at * size, width * size, count, out + at * 4, width * 4))
            at += LANES

    return run


@njit
def address(array: Any) -> Any:
    """Of its first number, signed: sums with other whole numbers stay whole."""
    return np.int64(array.ctypes.data)


@njit(cache=True, nogil=True)
def multiply_rows(x_RI: Any, weight: Any, out_RO: Any, first: Any, last: Any) -> None:
    """See `multiply`."""
    rows, size = x_RI.shape[0], x_RI.shape[1] * x_RI.itemsize
    x, out, stride = address(x_RI), address(out_RO), out_RO.strides[0]
    for start in range(0, rows, BLOCK_ROWS):
        count = min(BLOCK_ROWS, rows - start)
        parts = (count + ROWS - 1) // ROWS
        column = first
        while column < last:
            at = min(column, last - ACROSS)  # the last ones may be computed twice
            row = start
            for part in range(parts):
                m = (start + count - row + parts - part - 1) // (parts - part)
                ahead = AHEAD * size if part == 0 else 0
                place = out + row * stride + at * 4
                tiles_of(x_RI, m, (x + row * size, weight + at * size, size, place, stride, ahead))
                row += m
            column += ACROSS


MATRIX = matrix_registers()


def ready(x_RI: Any) -> Any:
    """x, contiguous (bfloat16 as uint16), as `multiply` takes it here."""


@overload(ready)
def _ready(x_RI: Any) -> Any:
    def itself(x_RI: Any) -> Any:
        return x_RI

    def on_its_side(x_RI: Any) -> Any:
        return compiled_matrix.turned(x_RI)

    return on_its_side if MATRIX and x_RI.dtype == types.uint16 else itself


def some_rows(x: Any, first: Any, last: Any) -> Any:
    """Of what `ready` gave; `first` is a multiple of BLOCK_ROWS."""


@overload(some_rows)
def _some_rows(x: Any, first: Any, last: Any) -> Any:
    tall = compiled_matrix.TALL if x.ndim == 3 else 1

    def some(x: Any, first: Any, last: Any) -> Any:
        return x[first // tall : (last + tall - 1) // tall]

    return some


def multiply(x: Any, weight: Any, out_RO: Any, first: Any, last: Any) -> None:
    """out fp32 [R, O], columns first..last (a multiple of 4 before the end, 4 or more) <- x @ weight.T.

    x: as `ready` gives it. weight: address of [O, I] in x's dtype. Of out, each row is contiguous.
    """


@overload(multiply)
def _multiply(x: Any, weight: Any, out_RO: Any, first: Any, last: Any) -> Any:
    product = multiply_rows if x.ndim == 2 else compiled_matrix.multiply

    def run(x: Any, weight: Any, out_RO: Any, first: Any, last: Any) -> None:
        product(x, weight, out_RO, first, last)

    return run


@njit(cache=True)
def share(outputs: Any, part: Any, parts: Any) -> Any:
    """(first, last) column of a part's share: whole blocks of 4, the rest with the last. Maybe none."""
    blocks = outputs // ACROSS
    last = outputs if part == parts - 1 else blocks * (part + 1) // parts * ACROSS
    return blocks * part // parts * ACROSS, last
