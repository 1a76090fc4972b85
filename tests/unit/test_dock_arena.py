"""The shared arena: leases, generations, and what is left after a kill."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from docklands.dock.warehouse import arena as arenas
from docklands.dock.warehouse.arena import Arena, Mapped, SlabWriter, first_run, start_ticks, sweep
from docklands.errors import DockError, RowGone, WireError

BLOCK = 1 << 16


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = Arena("test", 8 * BLOCK, tmp_path, BLOCK)
    yield made
    made.close()


def numbers(count: int, first: int = 0) -> torch.Tensor:
    return (torch.arange(first, first + count) % 251).to(torch.uint8)


def test_what_is_written_is_read_through_another_mapping(arena: Arena) -> None:
    extent = arena.lease(BLOCK)
    assert extent is not None
    writer = SlabWriter(str(arena.path), extent)
    reader = Mapped(str(arena.path), arena.nonce)
    first, second = writer.write(numbers(1000)), writer.write(numbers(70, 9))
    assert reader.view(first[1], first[2], 1000).tolist() == numbers(1000).tolist()
    assert reader.view(second[1], second[2], 70).tolist() == numbers(70, 9).tolist()
    assert second[2] - first[2] == 1024, "values begin at multiples of 64"
    assert arena.view(second[2], 70).tolist() == numbers(70, 9).tolist()
    with pytest.raises(DockError, match="do not fit"):
        writer.write(numbers(BLOCK))


def test_a_recycled_slot_is_seen_before_and_after_use(arena: Arena) -> None:
    extent = arena.lease(BLOCK)
    assert extent is not None
    _, generation, offset = SlabWriter(str(arena.path), extent).write(numbers(100))
    reader = Mapped(str(arena.path), arena.nonce)
    held = reader.view(generation, offset, 100)
    arena.release(extent)
    again = arena.lease(BLOCK)
    assert again is not None and again.offset == extent.offset and again.generation != generation
    SlabWriter(str(arena.path), again).write(numbers(100, 50))
    assert held.tolist() != numbers(100).tolist(), "the room is really used again"
    with pytest.raises(RowGone, match="freed while they were read"):
        reader.check(generation, offset)
    with pytest.raises(RowGone):
        reader.view(generation, offset, 100)


def test_a_reader_cannot_change_what_others_see(arena: Arena) -> None:
    extent = arena.lease(100)
    assert extent is not None
    _, generation, offset = SlabWriter(str(arena.path), extent).write(numbers(100))
    Mapped(str(arena.path), arena.nonce).view(generation, offset, 100).fill_(7)
    assert arena.view(offset, 100).tolist() == numbers(100).tolist()


def test_references_out_of_range_are_refused(arena: Arena) -> None:
    extent = arena.lease(100)
    assert extent is not None
    reader = Mapped(str(arena.path), arena.nonce)
    for offset, nbytes in ((0, 8), (-8, 16), (reader.nbytes - 4, 8), (1 << 62, 8), (extent.offset, 0)):
        with pytest.raises(WireError):
            reader.view(extent.generation, offset, nbytes)
    with pytest.raises(WireError, match="not the arena"):
        Mapped(str(arena.path), b"x" * 16)
    with pytest.raises(WireError):
        Mapped(str(arena.path.with_name("docklands-none")), arena.nonce)
    with pytest.raises(WireError):
        Mapped("/etc/passwd", arena.nonce)


def test_leases_are_first_fit_and_never_overlap(arena: Arena) -> None:
    rng = np.random.default_rng(3)
    held: list[arenas.Extent] = []
    seen: set[int] = set()
    for _ in range(500):
        extent = arena.lease(int(rng.integers(1, 3 * BLOCK)))
        if extent is None or rng.random() < 0.3:
            if held:
                arena.release(held.pop(int(rng.integers(len(held)))))
        if extent is not None:
            assert extent.generation not in seen
            seen.add(extent.generation)
            held.append(extent)
        spans = sorted((e.offset, e.offset + e.nbytes) for e in held)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
        assert arena.used == sum(e.nbytes for e in held)
    assert first_run(np.array([1, 0, 1, 0, 0, 1], bool), 2) == 3
    assert first_run(np.array([1, 0, 1], bool), 2) is None and first_run(np.zeros(0, bool), 1) is None


def test_a_full_file_system_is_an_answer(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert arena.lease(10) is None and arena.used == 0


def test_the_arenas_of_dead_processes_are_swept_and_no_others(arena: Arena, tmp_path: Path) -> None:
    ready, done = os.pipe()
    child = os.fork()
    if not child:
        made = Arena("dead", BLOCK, tmp_path)
        os.write(done, made.path.name.encode())
        time.sleep(60)
        os._exit(0)
    name = os.read(ready, 200).decode()
    assert sweep(tmp_path) == [] and (tmp_path / name).exists()
    assert name.split("-")[1:4] == ["dead", str(child), str(start_ticks(child))]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    (tmp_path / "docklands-being-made").touch()
    assert sweep(tmp_path) == [name]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([arena.path.name, "docklands-being-made"])
    os.utime(tmp_path / "docklands-being-made", (0, 0))
    assert sweep(tmp_path) == ["docklands-being-made"]
    arena.close()
    assert list(tmp_path.iterdir()) == []


def test_a_dead_process_has_no_start() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert start_ticks(child) == 0 and start_ticks(os.getpid()) > 0
