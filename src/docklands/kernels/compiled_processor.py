"""What the processor offers to compiled code. Imports numba: used by other compiled_*.py files only."""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache

import llvmlite.binding as llvm
from numba.core import config

_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA


def has(feature: str) -> bool:
    """Whether LLVM finds it here, under its own name, and numba compiles for this processor and no other."""
    other = config.CPU_NAME or config.CPU_FEATURES  # type: ignore[attr-defined]
    return not other and bool(llvm.get_host_cpu_features().get(feature))


@cache
def matrix_registers() -> bool:
    """Whether there are matrix registers for bfloat16 (AMX) and Linux lets this process use them: asked for here, once.

    Without having asked, a process is killed by its first use.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64" or not (has("amx-tile") and has("amx-bf16")):
        return False
    return ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0
