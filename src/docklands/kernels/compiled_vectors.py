"""What a decode step does to short rows of numbers, as LLVM is told to compile it: whole registers, no slices.

A head has 64 numbers and a row some hundred keys; a loop that numba compiles spends more on slicing and on checks
whether it may run in registers than on the numbers. These take addresses; counts are multiples of LANES.

For processors with AVX-512. Imported by other compiled_*.py files only. Every result depends on its row alone.

Legend: H head dim; addresses in bytes, counts in numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from docklands.kernels.compiled_cache import njit
from docklands.kernels.compiled_loops import EXP2, LOG2_E
from docklands.kernels.compiled_tiles import LANES

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_WIDE, _WHOLE, _HALF = (ir.VectorType(kind, LANES) for kind in (_F32, _I32, _I16))
LEAST = -126.0  # powers of two from here down count as nothing


class _Code:
    """Emits operations on registers of LANES fp32 numbers; of memory that holds bfloat16 where `half`."""

    def __init__(self, builder: Any, half: bool = False) -> None:
        self.b, self.half = builder, half
        self.size = 2 if half else 4

    def all(self, value: Any) -> Any:
        """A number in every lane."""
        if isinstance(value, float):
            return ir.Constant(_WIDE, [value] * LANES)
        first = self.b.insert_element(ir.Constant(_WIDE, ir.Undefined), value, _I32(0))
        return self.b.shuffle_vector(first, first, ir.Constant(_WHOLE, [0] * LANES))

    def call(self, name: str, *args: Any) -> Any:
        """An LLVM intrinsic on registers."""
        kind = ir.FunctionType(_WIDE, [_WIDE] * len(args))
        return self.b.call(self.b.module.declare_intrinsic(f"llvm.{name}.v{LANES}f32", (), kind), args)

    def _at(self, base: Any, index: Any, size: int, kind: Any) -> Any:
        return self.b.inttoptr(self.b.add(base, self.b.mul(index, _I64(size))), kind.as_pointer())

    def load(self, base: Any, index: Any) -> Any:
        """fp32 numbers."""
        return self.b.load(self._at(base, index, 4, _WIDE), align=4)

    def store(self, x: Any, base: Any, index: Any) -> None:
        """fp32 numbers."""
        self.b.store(x, self._at(base, index, 4, _WIDE), align=4)

    def read(self, base: Any, index: Any) -> Any:
        """Activations, as fp32."""
        if not self.half:
            return self.load(base, index)
        bits = self.b.zext(self.b.load(self._at(base, index, 2, _HALF), align=2), _WHOLE)
        return self.b.bitcast(self.b.shl(bits, self._bits(16)), _WIDE)

    def write(self, x: Any, base: Any, index: Any) -> None:
        """Activations, rounded."""
        if not self.half:
            return self.store(x, base, index)
        upper = self.b.lshr(self._rounded(x), self._bits(16))
        self.b.store(self.b.trunc(upper, _HALF), self._at(base, index, 2, _HALF), align=2)
        return None

    def settle(self, x: Any) -> Any:
        """Rounded to what an activation can hold: to the nearest, ties to even."""
        if not self.half:
            return x
        return self.b.bitcast(self.b.and_(self._rounded(x), self._bits(0xFFFF0000)), _WIDE)

    def _bits(self, value: int) -> Any:
        return ir.Constant(_WHOLE, [value] * LANES)

    def _rounded(self, x: Any) -> Any:
        b, bits = self.b, self.b.bitcast(x, _WHOLE)
        odd = b.and_(b.lshr(bits, self._bits(16)), self._bits(1))
        return b.add(bits, b.add(odd, self._bits(0x7FFF)))

    def larger(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def folded(self, x: Any, both: Callable[[Any, Any], Any]) -> Any:
        """One number of a register's: halves with halves, always in the same order."""
        size = LANES
        while size > 1:
            size //= 2
            low, high = (ir.Constant(ir.VectorType(_I32, size), list(range(at, at + size))) for at in (0, size))
            x = both(self.b.shuffle_vector(x, x, low), self.b.shuffle_vector(x, x, high))
        return self.b.extract_element(x, _I32(0))

    def exponential(self, x: Any) -> Any:
        """2^x, 0 from 2^-126 down; x at most 0."""
        b, least = self.b, self.all(LEAST)
        y = self.larger(x, least)
        whole = self.call("floor", b.fadd(y, self.all(0.5)))
        f, total = b.fsub(y, whole), self.all(float(EXP2[6]))
        for term in reversed(EXP2[:6]):
            total = self.call("fma", total, f, self.all(float(term)))
        power = b.shl(b.add(b.fptosi(whole, _WHOLE), self._bits(127)), self._bits(23))
        value = b.fmul(total, b.bitcast(power, _WIDE))
        return b.select(b.fcmp_ordered(">", y, least), value, self.all(0.0))

    def over(self, count: Any, starts: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """For each register of `count` numbers (at least one): states <- body(index, states). -> the last states"""
        b = self.b
        before, loop, done = b.block, b.append_basic_block("numbers"), b.append_basic_block("after")
        b.branch(loop)
        b.position_at_end(loop)
        at = b.phi(_I64)
        states = [b.phi(start.type) for start in starts]
        grown = body(at, states)
        following = b.add(at, _I64(LANES))
        at.add_incoming(_I64(0), before)
        at.add_incoming(following, loop)
        for state, start, more in zip(states, starts, grown):
            state.add_incoming(start, before)
            state.add_incoming(more, loop)
        b.cbranch(b.icmp_signed("<", following, count), loop, done)
        b.position_at_end(done)
        return grown


def _exponentials(context: Any, z: Any, most: Any, out: Any, count: Any) -> Any:
    """out <- exp(z - most), which is at most 1. -> their sum"""

    def emit(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        code, (z, most, out, count) = _Code(builder), args
        top, scale = code.all(most), code.all(float(LOG2_E))

        def body(at: Any, states: list[Any]) -> list[Any]:
            value = code.exponential(builder.fmul(builder.fsub(code.load(z, at), top), scale))
            code.store(value, out, at)
            return [builder.fadd(states[0], value)]

        return code.folded(code.over(count, [code.all(0.0)], body)[0], builder.fadd)

    return types.float32(types.int64, types.float32, types.int64, types.int64), emit


def _soften(context: Any, z: Any, count: Any, scale: Any) -> Any:
    """z <- softmax(z * scale), scale above 0, in place."""

    def emit(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        code, (z, count, scale) = _Code(builder), args
        lowest = code.all(float("-inf"))
        tops = code.over(count, [lowest], lambda at, states: [code.larger(code.load(z, at), states[0])])[0]
        top = code.all(code.folded(tops, code.larger))
        factor = code.all(builder.fmul(scale, ir.Constant(_F32, float(LOG2_E))))

        def weigh(at: Any, states: list[Any]) -> list[Any]:
            value = code.exponential(builder.fmul(builder.fsub(code.load(z, at), top), factor))
            code.store(value, z, at)
            return [builder.fadd(states[0], value)]

        total = code.folded(code.over(count, [code.all(0.0)], weigh)[0], builder.fadd)
        share = code.all(builder.fdiv(ir.Constant(_F32, 1.0), total))

        def divide(at: Any, states: list[Any]) -> list[Any]:
            code.store(builder.fmul(code.load(z, at), share), z, at)
            return []

        code.over(count, [], divide)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), emit


def _numbers(half: bool) -> Any:
    def numbers(context: Any, source: Any, out: Any, count: Any) -> Any:
        def emit(target: Any, builder: Any, signature: Any, args: Any) -> Any:
            code, (source, out, count) = _Code(builder, half), args
            none, nan = code.all(float("-inf")), code.all(float("nan"))

            def body(at: Any, states: list[Any]) -> list[Any]:
                z = code.read(source, at)
                code.store(z, out, at)
                most, wrong = states
                return [code.larger(z, most), builder.select(builder.fcmp_unordered("uno", z, z), nan, wrong)]

            most, wrong = code.over(count, [none, code.all(0.0)], body)
            return builder.fadd(code.folded(most, code.larger), code.folded(wrong, builder.fadd))

        return types.float32(types.int64, types.int64, types.int64), emit

    return intrinsic(numbers)


def _turn(half: bool) -> Any:
    def turn(context: Any, places: Any, angles: Any) -> Any:
        def emit(target: Any, builder: Any, signature: Any, args: Any) -> Any:
            code, (places, angles) = _Code(builder, half), (cgutils.unpack_tuple(builder, x) for x in args)
            (y, bias, out), (cos, sin, count) = places, angles

            def body(at: Any, states: list[Any]) -> list[Any]:
                upper = builder.add(at, count)
                low, high = (code.settle(builder.fadd(code.load(y, i), code.load(bias, i))) for i in (at, upper))
                c, s = code.load(cos, at), code.load(sin, at)
                less = code.call("fma", builder.fneg(high), s, code.settle(builder.fmul(low, c)))
                code.write(less, out, at)
                code.write(code.call("fma", low, s, code.settle(builder.fmul(high, c))), out, upper)
                return []

            code.over(count, [], body)
            return target.get_dummy_value()

        return types.void(*[types.UniTuple(types.int64, 3)] * 2), emit

    return intrinsic(turn)


def _plus(half: bool) -> Any:
    def plus(context: Any, y: Any, bias: Any, out: Any, count: Any) -> Any:
        def emit(target: Any, builder: Any, signature: Any, args: Any) -> Any:
            code, (y, bias, out, count) = _Code(builder, half), args

            def body(at: Any, states: list[Any]) -> list[Any]:
                code.write(builder.fadd(code.load(y, at), code.load(bias, at)), out, at)
                return []

            code.over(count, [], body)
            return target.get_dummy_value()

        return types.void(*[types.int64] * 4), emit

    return intrinsic(plus)


exponentials_at: Any = intrinsic(_exponentials)
soften: Any = intrinsic(_soften)
_KINDS = {name: (make(False), make(True)) for name, make in (("numbers", _numbers), ("turn", _turn), ("plus", _plus))}


def _named(function: Any, name: str) -> Any:
    """See compiled_tiles: a name of its own for each dtype."""
    function.__name__ = function.__qualname__ = name
    return njit(function, inline="never", nogil=True)


def _numbers_of(half: bool) -> Any:
    inner = _KINDS["numbers"][half]
    return _named(lambda source, out, count: inner(source, out, count), f"numbers_{half}")


def _turn_of(half: bool) -> Any:
    inner = _KINDS["turn"][half]
    return _named(lambda places, angles: inner(places, angles), f"turn_{half}")


def _plus_of(half: bool) -> Any:
    inner = _KINDS["plus"][half]
    return _named(lambda y, bias, out, count: inner(y, bias, out, count), f"plus_{half}")


_READY = {half: (_numbers_of(half), _turn_of(half), _plus_of(half)) for half in (False, True)}


def numbers_at(like: Any, source: Any, out: Any, count: Any) -> Any:
    """out fp32 <- source, numbers of like's dtype. -> the largest; NaN where one of them is."""


@overload(numbers_at)
def _numbers_at(like: Any, source: Any, out: Any, count: Any) -> Any:
    run = _READY[like.dtype == types.uint16][0]

    def numbers(like: Any, source: Any, out: Any, count: Any) -> Any:
        return run(source, out, count)

    return numbers


def turn_at(like: Any, y: Any, bias: Any, turn: Any, out: Any) -> None:
    """One head: out [H] in like's dtype <- rotated(y + bias), rounded after each of the steps that modules round after.
    turn = (cos, sin, H / 2)
    """


@overload(turn_at)
def _turn_at(like: Any, y: Any, bias: Any, turn: Any, out: Any) -> Any:
    run = _READY[like.dtype == types.uint16][1]

    def turned(like: Any, y: Any, bias: Any, turn: Any, out: Any) -> None:
        run((y, bias, out), turn)

    return turned


def plus_at(like: Any, y: Any, bias: Any, out: Any, count: Any) -> None:
    """out in like's dtype <- y + bias"""


@overload(plus_at)
def _plus_at(like: Any, y: Any, bias: Any, out: Any, count: Any) -> Any:
    run = _READY[like.dtype == types.uint16][2]

    def plus(like: Any, y: Any, bias: Any, out: Any, count: Any) -> None:
        run(y, bias, out, count)

    return plus
