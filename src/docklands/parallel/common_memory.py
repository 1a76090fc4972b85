"""Memory that all ranks of a group on one machine see: a file without a name, mapped by each, gone with the last."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from docklands.parallel.mesh import Group

NAME = "docklands"
LINE = 64
"""Every tensor starts at a multiple of these bytes."""


class CommonMemory:
    """Zeros at first; pages that nobody has written take no memory. See `common_memory`."""

    def __init__(self, mapped: mmap.mmap, group: Group) -> None:
        self.group = group
        self._mapped = mapped
        self._at = LINE  # after the token

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next free part. Every rank must ask for the same, in the same order."""
        at, count = self._at, math.prod(shape)
        self._at = at + room(count * dtype.itemsize)
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(self._mapped, dtype=dtype, count=count, offset=at).view(*shape)

    def meet(self) -> None:
        """Wait until all ranks are here: what each wrote before, all see after."""
        dist.barrier(self.group.pg)


def room(nbytes: int) -> int:
    """Bytes that a tensor of `nbytes` takes."""
    return max(1, -(-nbytes // LINE)) * LINE


def common_memory(group: Group, nbytes: int) -> CommonMemory | None:
    """Room for tensors of `nbytes` in all, see `room`. Every rank of the group calls; None on all of them where one
    cannot map the first one's memory: they are on several machines, or see each other's processes under other numbers.
    """
    token, size = secrets.token_bytes(16), nbytes + LINE
    made = _made(size, token) if group.rank == 0 else None
    said: list[Any] = [None if made is None else (os.getpid(), made[0], token)]
    dist.broadcast_object_list(said, group.ranks[0], group=group.pg)
    mapped = None if made is None else made[1]
    if mapped is None and said[0] is not None:
        pid, file, token = said[0]
        mapped = _opened(f"/proc/{pid}/fd/{file}", size, token)
    found = torch.tensor(int(mapped is not None))
    dist.all_reduce(found, dist.ReduceOp.MIN, group=group.pg)
    if made is not None:
        os.close(made[0])
    return CommonMemory(mapped, group) if mapped is not None and int(found) else None


def _made(size: int, token: bytes) -> tuple[int, mmap.mmap] | None:
    """A new file in memory that begins with the token, and its bytes; None where there is no such thing."""
    try:
        file = os.memfd_create(NAME, os.MFD_CLOEXEC)
    except (AttributeError, OSError):  # not Linux, or forbidden
        return None
    try:
        os.ftruncate(file, size)
        mapped = mmap.mmap(file, size)
    except (OSError, ValueError):
        os.close(file)
        return None
    mapped[: len(token)] = token
    return file, mapped


def _opened(path: str, size: int, token: bytes) -> mmap.mmap | None:
    """Another process's file, if it is the one that holds the token."""
    with contextlib.suppress(OSError, ValueError):
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):  # of a process that has the same number: anything at all
            return None
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            if os.fstat(file).st_size == size:
                mapped = mmap.mmap(file, size)
                if mapped[: len(token)] == token:
                    return mapped
        finally:
            os.close(file)
    return None
