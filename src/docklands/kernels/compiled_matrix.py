"""Matrix products of bfloat16 in the processor's matrix registers (AMX), as LLVM is told to compile them.

A weight [O, I] is read as it is stored: 16 of its rows by 32 inputs fill a register. x is turned on its side first, 16
rows a group, so that a register holds the same inputs of all of them; a result comes out on its side and is turned
back. Every number is one sum in one order, whatever is computed beside it: a row has the same bits in any company.

Used by compiled_tiles.py only, where `compiled_processor.matrix_registers()`.

Legend: R rows, G groups of rows, I inputs, O outputs, Q = I / 2 pairs of inputs; addresses and strides in bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from docklands.kernels.compiled_cache import njit

TALL = 16  # rows of a register, of 64 bytes each
REGISTER = 1024  # its bytes
GROUPS = 16  # of rows that stay in a core's second cache while a weight passes

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_WIDE = ir.VectorType(_I32, TALL)


class _Code:
    """Emits instructions on registers 0 to 3 (sums: two strips of the weight for each of two groups), 4 and 5 (the
    strips), 6 and 7 (the groups).
    """

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def call(self, name: str, *args: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
        self.b.call(self.b.module.declare_intrinsic(f"llvm.{name}", (), kind), args)

    def at(self, base: Any, offset: Any = None, kind: Any = _I8) -> Any:
        return self.b.inttoptr(base if offset is None else self.b.add(base, offset), kind.as_pointer())

    def sums(self, groups: int, ask: bool, args: Any) -> None:
        """args: two strips of the weight, bytes of its row, two groups of x, bytes ahead, out [2 groups, 2 strips]."""
        b = self.b
        strips, size, x, ahead, out = args[:2], args[2], args[3:5], args[5], args[6]
        places = [(group, strip) for group in range(groups) for strip in range(2)]
        for group, strip in places:
            self.call("x86.tilezero", _I8(2 * group + strip))
        before, loop, done = b.block, b.append_basic_block("inputs"), b.append_basic_block("sums")
        b.branch(loop)
        b.position_at_end(loop)
        at = b.phi(_I64)
        for strip in range(2):
            self.call("x86.tileloadd64", _I8(4 + strip), self.at(strips[strip], at), size)
        for group in range(groups):
            place = self.at(x[group], b.mul(at, _I64(REGISTER // 64)))
            self.call("x86.tileloadd64", _I8(6 + group), place, _I64(64))
        for group, strip in places:
            self.call("x86.tdpbf16ps", _I8(2 * group + strip), _I8(4 + strip), _I8(6 + group))
        if ask:
            far = b.add(b.add(strips[0], ahead), b.mul(at, _I64(2 * TALL)))
            for line in range(2 * TALL):
                self.call("prefetch.p0", self.at(far, _I64(64 * line)), _I32(0), _I32(2), _I32(1))
        following = b.add(at, _I64(64))
        at.add_incoming(_I64(0), before)
        at.add_incoming(following, loop)
        b.cbranch(b.icmp_signed("<", following, size), loop, done)
        b.position_at_end(done)
        for group, strip in places:
            register = 2 * group + strip
            self.call("x86.tilestored64", _I8(register), self.at(out, _I64(register * REGISTER)), _I64(64))

    def turned(self, rows: list[Any]) -> list[Any]:
        """16 vectors -> the 16 columns of what they are the rows of."""
        distance = TALL // 2
        while distance:
            for i in [i for i in range(TALL) if not i & distance]:
                a, c = rows[i], rows[i + distance]
                low = [lane if not lane & distance else TALL + lane - distance for lane in range(TALL)]
                high = [lane + distance if not lane & distance else TALL + lane for lane in range(TALL)]
                rows[i], rows[i + distance] = (
                    self.b.shuffle_vector(a, c, ir.Constant(ir.VectorType(_I32, TALL), order)) for order in (low, high)
                )
            distance //= 2
        return rows

    def turn(self, args: Any) -> None:
        """args: 16 numbers of 4 bytes of each of 16 rows, stride, the last row that there is; out [16, 16], stride."""
        b = self.b
        source, stride, last, out, out_stride = args
        rows = []
        for row in range(TALL):
            here = b.select(b.icmp_signed("<", _I64(row), last), _I64(row), last)
            rows.append(b.load(self.at(source, b.mul(here, stride), _WIDE), align=4))
        for row, column in enumerate(self.turned(rows)):
            b.store(column, self.at(out, b.mul(out_stride, _I64(row)), _WIDE), align=4)


def _intrinsic(count: int, emit: Any) -> Any:
    """One of a tuple of `count` whole numbers; `emit` takes the code and the numbers."""

    def inner(context: Any, numbers: Any) -> Any:
        def code(target: Any, builder: Any, signature: Any, args: Any) -> Any:
            emit(_Code(builder), cgutils.unpack_tuple(builder, args[0]))
            return target.get_dummy_value()

        return types.void(types.UniTuple(types.int64, count)), code

    return intrinsic(inner)


_turn = _intrinsic(5, _Code.turn)
_two, _two_asking, _one, _one_asking = (
    _intrinsic(7, lambda code, args, groups=groups, ask=ask: code.sums(groups, ask, args))
    for groups in (2, 1)
    for ask in (False, True)
)
_keep = _intrinsic(1, lambda code, args: code.call("x86.sttilecfg", code.at(args[0])))
_shape = _intrinsic(1, lambda code, args: code.call("x86.ldtilecfg", code.at(args[0])))


@njit(cache=True, nogil=True)
def turned(x_RI: Any) -> Any:
    """x, bfloat16 as uint16 and contiguous -> its pairs of inputs, uint32 [G, Q, 16]."""
    rows, pairs = x_RI.shape[0], x_RI.shape[1] // 2
    groups = (rows + TALL - 1) // TALL
    out_GQ = np.empty((groups, pairs, TALL), np.uint32)
    x, out, size = np.int64(x_RI.ctypes.data), np.int64(out_GQ.ctypes.data), 4 * pairs
    for group in range(groups):
        last = np.int64(min(TALL, rows - group * TALL) - 1)  # rows that there are not: as the last
        for at in range(0, pairs, TALL):
            _turn((x + group * TALL * size + at * 4, size, last, out + (group * pairs + at) * 64, np.int64(64)))
    return out_GQ


@njit
def keep(shapes: Any) -> None:
    """This thread's shape of the registers -> shapes uint8 [64]."""
    _keep((np.int64(shapes.ctypes.data),))


@njit
def shape(shapes: Any) -> None:
    """The other way."""
    _shape((np.int64(shapes.ctypes.data),))


@njit(cache=True, nogil=True)
def multiply(x_GQ: Any, weight: Any, out_RO: Any, first: Any, last: Any) -> None:
    """out fp32 [R, O], columns first..last <- x @ weight.T, of x as `turned` gives it; of out, each row is contiguous.

    weight: address of [O, I] in bfloat16.
    """
    if last <= first:
        return
    tall = min(TALL, last - first)
    before, ours = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    ours[0] = 1
    for register in range(8):
        ours[16 + 2 * register] = 64
        ours[48 + register] = tall if register < 6 else TALL
    keep(before)
    shape(ours)
    scratch = np.empty((4, TALL, TALL), np.float32), np.empty((TALL, TALL), np.float32)
    _strips(x_GQ, weight, out_RO, (first, last, tall), scratch)
    shape(before)


@njit(cache=True, nogil=True)
def _strips(x_GQ: Any, weight: Any, out_RO: Any, columns: Any, scratch: Any) -> None:
    """See `multiply`; columns = (first, last, how many in a register). Scratch comes from the caller, which holds it: a
    function lets go of an array of its own after the last use of its name, whatever still knows its address.
    """
    first, last, tall = columns
    sums, flat = scratch
    rows, size = out_RO.shape[0], np.int64(x_GQ.shape[1] * 4)
    x, out, flat_at = np.int64(x_GQ.ctypes.data), np.int64(sums.ctypes.data), np.int64(flat.ctypes.data)
    for start in range(0, x_GQ.shape[0], GROUPS):
        end = min(start + GROUPS, x_GQ.shape[0])
        for column in range(first, last, 2 * TALL):
            places = min(column, last - tall), min(column + TALL, last - tall)  # the last may be computed twice
            a, b = np.int64(weight + places[0] * size), np.int64(weight + places[1] * size)
            for group in range(start, end, 2):
                at = x + group * TALL * size
                numbers = (a, b, size, at, at + TALL * size, 2 * TALL * size, out)
                if group + 1 < end:
                    if group == start:
                        _two_asking(numbers)
                    else:
                        _two(numbers)
                elif group == start:
                    _one_asking(numbers)
                else:
                    _one(numbers)
                for i in range(min(4, 2 * (end - group))):
                    row, to = (group + i // 2) * TALL, places[i % 2]
                    _turn((out + i * REGISTER, np.int64(64), np.int64(TALL - 1), flat_at, np.int64(64)))
                    for r in range(min(TALL, rows - row)):
                        for o in range(tall):
                            out_RO[row + r, to + o] = flat[r, o]
