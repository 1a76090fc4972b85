"""Memory tiers: bytes come back to the bit, resident memory really falls, and overlap."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from docklands.errors import SyncError
from docklands.obs.spans import SpanRecorder, read_spans, recording
from docklands.sync.memory import FileTier, MemoryTiers, give_back, is_resident

MIB = 1 << 20


def state(mib: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Tensors of 2 MiB each."""
    numbers = torch.Generator().manual_seed(mib)
    shape = (2 * MIB // dtype.itemsize // 256, 256)
    return {f"t{i}": torch.rand(shape, generator=numbers).to(dtype) for i in range(mib // 2)}


def resident() -> int:
    return psutil.Process().memory_info().rss


def test_resident_memory_falls_and_returns(tmp_path: Path) -> None:
    """A model of 200 MB in weights (bf16), gradients (fp32) and moments (fp32), as a process holds them."""
    tiers = MemoryTiers(folder=tmp_path)
    held = {"weights": state(30, torch.bfloat16), "gradients": state(60), "optimizer": state(110)}
    for kind, tensors in held.items():
        tiers.register(kind, tensors)  # type: ignore[arg-type]
    sums = {kind: [t.view(torch.int16).sum(dtype=torch.int64) for t in v.values()] for kind, v in held.items()}
    assert tiers.bytes("weights", "gradients", "optimizer") == 200 * MIB
    full = resident()
    assert tiers.swap_out("weights", "gradients", "optimizer") == 200 * MIB
    away = resident()
    assert full - away >= 0.9 * 200 * MIB
    assert (tiers.ledger.of("device"), tiers.ledger.of("disk")) == (0, 200 * MIB)
    tiers.swap_in("weights", "gradients", "optimizer")
    assert resident() - away >= 0.9 * 200 * MIB
    for kind, tensors in held.items():
        assert all((t.view(torch.int16).sum(dtype=torch.int64) == s) for t, s in zip(tensors.values(), sums[kind]))
    assert (tiers.ledger.of("device"), tiers.ledger.of("disk"), tiers.ledger.peak("disk")) == (200 * MIB, 0, 200 * MIB)
    tiers.close()


def test_training_goes_on_as_if_nothing_had_moved(tmp_path: Path) -> None:
    """Parameters, gradients and Adam's moments leave between every two updates."""

    def train(tiers: MemoryTiers | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(4):
            model(torch.full((3, 8), step / 3)).square().sum().backward()
            if tiers is not None:
                named = dict(model.named_parameters())
                tiers.register("weights", {n: p.data for n, p in named.items()})
                tiers.register("gradients", {n: p.grad for n, p in named.items() if p.grad is not None})
                states = {f"{i}.{k}": t for i, s in enumerate(optimizer.state.values()) for k, t in s.items()}
                tiers.register("optimizer", {k: t for k, t in states.items() if t.dim()})
                tiers.swap_out("weights", "gradients", "optimizer")
                assert not any(is_resident(p) for p in model.parameters())
                tiers.prefetch("optimizer", "weights")
                tiers.swap_in("weights", "gradients", "optimizer")
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        return [p.detach().clone() for p in model.parameters()]

    moved, still = train(MemoryTiers(folder=tmp_path)), train(None)
    assert all(torch.equal(a, b) for a, b in zip(moved, still))


def test_tensors_that_share_a_storage_move_once(tmp_path: Path) -> None:
    tiers, whole = MemoryTiers(folder=tmp_path), torch.arange(12.0)
    tiers.register("weights", {"whole": whole, "part": whole[4:8], "turned": whole.view(3, 4).t()})
    tiers.register("optimizer", {"same": whole, "own": torch.ones(2)})
    assert (tiers.bytes("weights"), tiers.bytes("optimizer")) == (48, 8)
    tiers.swap_out("weights")
    assert tiers.swap_out("weights") == 0
    tiers.swap_in("weights")
    assert whole.tolist() == list(range(12))


@pytest.mark.parametrize(("number", "hint"), [(errno.ENOSPC, "TMPDIR"), (errno.EIO, "")], ids=["full", "broken"])
def test_only_a_full_disk_is_called_full(
    number: int, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    tiers = MemoryTiers(folder=tmp_path)
    tiers.register("weights", {"a": torch.ones(4)})
    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(SyncError, match=f"swapping memory to disk: {os.strerror(number)}") as raised:
        tiers.swap_out("weights")
    assert (hint in raised.value.hint) if hint else not raised.value.hint


def test_a_file_in_memory_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        FileTier("/dev/shm").close()
    assert [record.getMessage().partition(" frees")[0] for record in caplog.records] == ["swapping to /dev/shm"]


def test_an_accelerators_freed_blocks_leave_torchs_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("cuda"))
    give_back("cpu")
    give_back("cuda:0")
    assert called == ["cuda"]


def test_storage_that_cannot_be_freed_is_refused(tmp_path: Path) -> None:
    import numpy as np

    tiers = MemoryTiers(folder=tmp_path)
    tiers.register("weights", {"borrowed": torch.from_numpy(np.ones(4))})
    with pytest.raises(SyncError, match="borrowed: its storage cannot be freed"):
        tiers.swap_out("weights")


class Gate(FileTier):
    """Reads wait until they are let through."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reading, self.let = threading.Event(), threading.Event()

    def read(self, key: int, data: Tensor) -> None:
        self.reading.set()
        assert self.let.wait(20)
        super().read(key, data)


def test_prefetch_overlaps_with_work(tmp_path: Path) -> None:
    """The caller works while bytes come back, and the spans show both at once."""
    lower = Gate(tmp_path)
    tiers, tensors = MemoryTiers(lower=lower), state(4)
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    tiers.register("optimizer", tensors)
    with recording(SpanRecorder(tmp_path / "spans.jsonl")):
        tiers.swap_out("optimizer")
        tiers.prefetch("optimizer")
        assert lower.reading.wait(20) and not tiers.is_here("optimizer")
        from docklands.obs.spans import span

        with span("stage/reward"):
            assert torch.ones(64, 64).mm(torch.ones(64, 64)).sum() == 64**3
        lower.let.set()
        tiers.swap_in("optimizer", timeout_s=20)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    spans: dict[str, Any] = {row["name"]: row for row in read_spans(tmp_path)}
    prefetch, reward = spans["memory/prefetch"], spans["stage/reward"]
    assert prefetch["start"] <= reward["start"]
    assert prefetch["start"] + prefetch["duration"] >= reward["start"] + reward["duration"] - 1e-5
    assert spans["memory/swap_out"]["attributes"]["bytes"] == prefetch["attributes"]["bytes"] == 4 * MIB
    assert spans["memory/swap_out"]["attributes"]["disk_bytes"] == 4 * MIB
    assert [size for _, tier, _, size in tiers.ledger.history if tier == "device"][-1] == 4 * MIB


def test_a_prefetch_that_hangs_or_fails_is_an_error(tmp_path: Path) -> None:
    lower = Gate(tmp_path)
    tiers = MemoryTiers(lower=lower)
    tiers.register("gradients", state(2))
    tiers.swap_out("gradients")
    tiers.prefetch("gradients")
    with pytest.raises(SyncError, match="gradients: not back on the device within 0.05 s"):
        tiers.swap_in("gradients", timeout_s=0.05)
    lower._file.truncate(5)
    lower.let.set()
    with pytest.raises(SyncError, match="the file ended early"):
        tiers.swap_in("gradients")


def test_what_is_away_is_not_lost_when_it_is_registered_again(tmp_path: Path) -> None:
    tiers, moment = MemoryTiers(folder=tmp_path), torch.arange(6.0)
    tiers.register("optimizer", {"m": moment})
    tiers.swap_out("optimizer")
    tiers.register("optimizer", {"m": moment})
    assert tiers.is_here("optimizer") and moment.tolist() == list(range(6))
    assert (tiers.ledger.of("device"), tiers.ledger.of("disk")) == (24, 0)


def test_a_thousand_steps_leave_the_file_as_it_is(tmp_path: Path) -> None:
    """New gradients each step take the places of the old ones."""
    lower = FileTier(tmp_path)
    tiers = MemoryTiers(lower=lower)
    for _ in range(1000):
        tiers.register("gradients", {"a": torch.ones(10), "b": torch.ones(7)})
        tiers.swap_out("gradients")
        tiers.swap_in("gradients")
    assert lower._end == 68 and len(tiers.ledger.history) <= 10_000
    assert tiers.ledger.of("device") == 68
