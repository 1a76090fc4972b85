"""Threads that run one compiled function together: each its part, in step with the others.

A pass over a small model has hundreds of parts of a few microseconds; handing each to a pool would cost more than the
part. So every thread runs the whole function, and they meet at barriers made of two numbers in shared memory. A thread
that waits looks for a while, then offers its core to others between looks.

Imports numba: used by other compiled_*.py files only, when numba is there.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from docklands.kernels.compiled_cache import njit

STATE = 24
"""int64 numbers of a team's shared memory, zero at first: arrivals, generation, tasks taken; each on its own line."""
ARRIVED, GENERATION, TAKEN = 0, 8, 16
LOOKS = 4000


def _place(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


def _add_to(context: Any, address: Any, amount: Any) -> Any:
    """Add to the number at an address. -> what it was"""

    def emit(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _place(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


def _read(context: Any, address: Any) -> Any:
    """The number at an address, as other threads left it."""

    def emit(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_place(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), emit


def _write(context: Any, address: Any, value: Any) -> Any:
    """Set the number at an address, for other threads to see."""

    def emit(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _place(builder, args[0]), "seq_cst", 8)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), emit


def _give_way(context: Any) -> Any:
    """sched_yield(2)"""

    def emit(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        name = "sched_yield"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        return builder.call(function, [])

    return types.int32(), emit


add_to: Any = intrinsic(_add_to)
read: Any = intrinsic(_read)
write: Any = intrinsic(_write)
give_way: Any = intrinsic(_give_way)


@njit(cache=True, nogil=True)
def meet(state: Any, parts: Any) -> None:
    """Wait until all parts are here; what each wrote before, all see after. Tasks are counted from 0 again."""
    if parts == 1:
        state[TAKEN] = 0
        return
    at = state.ctypes.data
    generation = read(at + 8 * GENERATION)
    if add_to(at + 8 * ARRIVED, 1) == parts - 1:
        write(at + 8 * ARRIVED, 0)
        write(at + 8 * TAKEN, 0)
        add_to(at + 8 * GENERATION, 1)
        return
    looks = 0
    while read(at + 8 * GENERATION) == generation:
        looks += 1
        if looks > LOOKS:
            give_way()


@njit(cache=True, nogil=True)
def next_task(state: Any) -> Any:
    """The number of the next task that nobody has taken since the team met."""
    return add_to(state.ctypes.data + 8 * TAKEN, 1)
