"""Checkpoints: complete or not there; a kill, a cut file or a full disk never costs the ones from before."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import docklands
from docklands.errors import CheckpointError
from docklands.train import checkpoint

SAVE_FOREVER = """
import sys, torch
from docklands.train import checkpoint
root, step = sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
while True:
    step += 1
    states = {name: {"step": step, "x": torch.full((30000,), float(step))} for name in ("actor", "critic", "flow")}
    checkpoint.save(root, step, states, keep=2)
    checkpoint.save(root, step, states, keep=2)
"""


def states(step: int, size: int = 50) -> dict[str, dict[str, Any]]:
    return {"actor": {"step": step, "w": torch.full((size,), float(step))}, "flow": {"step": step, "rng": None}}


def stored(path: Path) -> int:
    """The step that all states of a checkpoint agree on."""
    found = {checkpoint.load(path, name)["step"] for name in ("actor", "flow")}
    assert found == {checkpoint.step_of(path)}
    return found.pop()


def test_save_load_latest_and_prune(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    assert checkpoint.latest(root) is None and checkpoint.complete(root) == []
    for step in (2, 4, 6):
        assert checkpoint.save(root, step, states(step), keep=2) == root / f"step_{step:06d}"
    assert [stored(path) for path in checkpoint.complete(root)] == [4, 6]
    assert sorted(p.name for p in root.iterdir()) == ["step_000004", "step_000006"]
    checkpoint.save(root, 6, states(6, 70))  # the same step again
    path = checkpoint.latest(root)
    assert path is not None and checkpoint.load(path, "actor")["w"].shape == (70,)


def test_pitfall_25_a_cut_file_is_never_loaded(tmp_path: Path) -> None:
    old, new = checkpoint.save(tmp_path, 2, states(2)), checkpoint.save(tmp_path, 4, states(4))
    for file in sorted(new.iterdir()):
        whole = file.read_bytes()
        cuts = range(len(whole)) if len(whole) < 300 else [*range(0, len(whole), 97), len(whole) - 1]
        for cut in cuts:
            file.write_bytes(whole[:cut])
            assert checkpoint.latest(tmp_path) == old, (file.name, cut)
            with pytest.raises(CheckpointError, match="is not complete"):
                checkpoint.load(new, "actor")
        file.unlink()
        assert checkpoint.latest(tmp_path) == old
        file.write_bytes(whole)
    assert checkpoint.latest(tmp_path) == new and stored(new) == 4


@pytest.mark.slow
def test_pitfall_25_a_kill_at_any_point_of_a_save(tmp_path: Path) -> None:
    """SIGKILL a process that saves without end, at random points; each time what is there is whole and newer."""
    checkpoint.save(tmp_path, 1, states(1))
    draw, newest = random.Random(0), 1
    source = str(Path(str(docklands.__file__)).parents[1])
    for _ in range(4):
        command = [sys.executable, "-c", SAVE_FOREVER, str(tmp_path), str(newest)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": source})
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(0.05 + draw.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL
        path = checkpoint.latest(tmp_path)
        assert path is not None and stored(path) >= newest
        newest = stored(path)
    assert newest > 1
    resumed = checkpoint.save(tmp_path, newest + 1, states(newest + 1))  # and it goes on, leaving no rubbish
    assert checkpoint.latest(tmp_path) == resumed
    assert all(p.name.startswith("step_") for p in tmp_path.iterdir())


@pytest.mark.parametrize("point", range(11))
def test_pitfall_25_a_kill_between_any_two_file_operations(
    point: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop a save that replaces a checkpoint after its n-th file operation: one of the two is always there."""
    checkpoint.save(tmp_path, 2, states(2))
    checkpoint.save(tmp_path, 4, states(4, 10))
    left = point

    class Killed(BaseException):
        """Passes through every `except Exception`, as a kill does."""

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return function(*args, **kwargs)

        return call

    for owner, name in ((checkpoint.os, "rename"), (checkpoint.os, "fsync"), (checkpoint.shutil, "rmtree")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    try:
        checkpoint.save(tmp_path, 4, states(4, 20), keep=1)
        finished = True
    except Killed:
        finished = False
    monkeypatch.undo()
    assert finished == (point >= 9)
    path = checkpoint.latest(tmp_path)
    assert path is not None and stored_size(path) in (10, 20)
    checkpoint.save(tmp_path, 6, states(6))
    assert stored(checkpoint.latest(tmp_path) or tmp_path) == 6
    assert all(p.name.startswith("step_") for p in tmp_path.iterdir())


def stored_size(path: Path) -> int:
    """How many weights the actor has."""
    assert checkpoint.load(path, "flow")["step"] == 4
    return len(checkpoint.load(path, "actor")["w"])


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """Every file is limited to 100 kB: the write fails midway, as on a full disk."""
    old = checkpoint.save(tmp_path, 2, states(2))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(
            CheckpointError, match="checkpoint of step 4 was not written to .*: File too large"
        ) as caught:
            checkpoint.save(tmp_path, 4, states(4, 1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert checkpoint.latest(tmp_path) == old and stored(old) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["step_000002"]
    assert stored(checkpoint.save(tmp_path, 4, states(4, 1_000_000))) == 4


def test_a_really_full_file_system(tmp_path: Path) -> None:
    """A 1 MiB tmpfs where mounting is allowed; the same check through a device that is always full where it is not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    mounted = (
        bool(mount)
        and not subprocess.run(
            [str(mount), "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True
        ).returncode
    )
    if not mounted:
        with pytest.raises(OSError, match="No space left"):
            checkpoint.write(Path("/dev/full"), {"x": torch.zeros(100_000)})
        return
    try:
        old = checkpoint.save(disk, 2, states(2))
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpoint.save(disk, 4, states(4, 1_000_000))
        assert checkpoint.latest(disk) == old and stored(old) == 2
        assert [p.name for p in disk.iterdir()] == ["step_000002"]
        assert stored(checkpoint.save(disk, 6, states(6))) == 6
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_no_permission_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="was not written to .*: Not a directory|File exists"):
        checkpoint.save(tmp_path / "file", 2, states(2))


def test_a_damaged_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 2, states(2))
    file = path / "actor.pt"
    file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(CheckpointError, match="actor.pt is damaged.*remove this checkpoint"):
        checkpoint.load(path, "actor")
    with pytest.raises(CheckpointError, match="has no state 'reward' .*actor, flow"):
        checkpoint.load(path, "reward")


def test_pitfall_25_a_damaged_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    """Same size, other bytes (a bad disk, a torn copy), in any file and at any place: refused, never NaN weights."""
    log = tmp_path / "dock.log"
    log.write_bytes(b"rows" * 100)
    path = checkpoint.save(tmp_path / "root", 1, {"actor": {"w": torch.zeros(10_000)}}, files=[log])
    checkpoint.verify(path)
    for name in ("actor.pt", "dock.log"):
        whole = (path / name).read_bytes()
        for at in (0, len(whole) // 2, len(whole) - 1):
            (path / name).write_bytes(whole[:at] + bytes([whole[at] ^ 0x80]) + whole[at + 1 :])
            assert checkpoint.latest(path.parent) == path  # its size is right
            with pytest.raises(CheckpointError, match=f"{name} is damaged"):
                checkpoint.verify(path)
            if name == "actor.pt":
                with pytest.raises(CheckpointError, match="is damaged"):
                    checkpoint.load(path, "actor")
        (path / name).write_bytes(whole)
    checkpoint.verify(path)


def test_only_data_is_read(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 2, {"actor": {"where": tmp_path}})  # a Path is code to unpickle
    with pytest.raises(CheckpointError, match="cannot read"):
        checkpoint.load(path, "actor")


def test_other_directories_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "step_000009").mkdir()  # incomplete
    checkpoint.save(tmp_path, 2, states(2), keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step_000002"]
    with pytest.raises(CheckpointError, match="is not a checkpoint directory"):
        checkpoint.step_of(tmp_path / "notes")
