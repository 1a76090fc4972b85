"""Columns, batches and processes that the tests of the warehouses share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from docklands.core.batch import Batch, Jagged, offsets_of, torch_dtype
from docklands.core.fields import DTYPES, PROMPT, PROMPT_TOKENS, REWARD, ROLLOUT_LOGPROBS, TOKEN_IDS, Field
from docklands.dock.warehouse import messages as m
from docklands.dock.warehouse.client import ClientOptions
from docklands.dock.warehouse.server import serve
from docklands.dock.warehouse.store import WarehouseOptions
from docklands.dock.wire.format import column_meta
from docklands.dock.wire.net import Keys, Peer, make_keys
from tests.forks import CONTEXT

ROUTES = Field("routes", "int16", ("T", 2, 3))
PAIR = Field("pair", "float32", (2,))
DENSE = tuple(Field(f"dense_{name}", name, (3,)) for name in sorted(DTYPES - {"json"}))
RAGGED = tuple(Field(f"ragged_{name}", name, ("*", 2)) for name in sorted(DTYPES - {"json"}))
FIELDS = (PROMPT, PROMPT_TOKENS, TOKEN_IDS, ROLLOUT_LOGPROBS, ROUTES, REWARD, PAIR)
READERS = {"prompt_tokens": ["rollout"], "token_ids": ["ref", "reward"], "reward": ["update"]}
BIRTH = m.Birth(0, 7, 0)


def values(field: Field[Any], count: int, rng: np.random.Generator) -> torch.Tensor:
    """Random bits of the field's dtype, [count, *inner]; bool stays 0 or 1."""
    shape = (count, *field.inner_shape)
    kind = torch_dtype(field)
    n = int(np.prod(shape))
    if kind == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, n).astype(bool)).reshape(shape)
    bits = torch.from_numpy(rng.integers(0, 256, n * kind.itemsize, dtype=np.uint8))
    return bits.view(kind).reshape(shape) if n else torch.empty(shape, dtype=kind)


def make_batch(lengths: list[int], fields: tuple[Field[Any], ...] = FIELDS, seed: int = 0, first: int = 0) -> Batch:
    """Rows first.. with random bits in every column."""
    rng = np.random.default_rng(seed)
    columns: dict[Field[Any], Any] = {}
    for field in fields:
        if field.is_json:
            columns[field] = [{"row": i, "text": "x" * n, "pi": 3.5} for i, n in enumerate(lengths)]
        elif field.is_ragged:
            own = lengths if field.is_token else rng.integers(0, 6, len(lengths)).tolist()
            columns[field] = Jagged(values(field, sum(own), rng), offsets_of(own))
        else:
            columns[field] = values(field, len(lengths), rng)
    return Batch(np.arange(first, first + len(lengths)), columns)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: Batch, b: Batch) -> bool:
    """Equal to the bit, NaN included."""
    if a.row_ids.tolist() != b.row_ids.tolist() or set(a.fields) != set(b.fields):
        return False
    for field in a.fields:
        x, y = a[field], b[field]
        if isinstance(x, Jagged):
            if x.lengths.tolist() != y.lengths.tolist() or x.values.shape != y.values.shape:
                return False
            x, y = x.values, y.values
        if isinstance(x, torch.Tensor):
            if x.dtype != y.dtype or x.shape != y.shape or bits(x) != bits(y):
                return False
        elif x != y:
            return False
    return True


def options(**more: Any) -> WarehouseOptions:
    return WarehouseOptions(
        **{"place": 0, "columns": [column_meta(f) for f in FIELDS], "readers": READERS, "run": "test", **more}
    )


# --- processes -----------------------------------------------------------------------------------------------------

CLIENT = ClientOptions(deadline_s=20.0, lost_s=10.0)


def run_warehouse(given: WarehouseOptions, ready: Any) -> None:
    """The body of a warehouse's process."""
    serve(given, lambda server: ready.send(server.listener.endpoint))


@dataclass
class Process:
    """A warehouse that runs."""

    options: WarehouseOptions
    process: Any
    peer: Peer
    keys: Keys

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.process.join(20)

    def stop(self) -> int | None:
        """End it politely; its exit code."""
        if self.process.is_alive():
            self.process.terminate()
        self.process.join(20)
        if self.process.is_alive():
            self.kill()
        return self.process.exitcode


def start_warehouse(client: Keys, server: Keys | None = None, friends: tuple[str, ...] = (), **more: Any) -> Process:
    """A warehouse process that listens on the loopback, from a forkserver that has torch already."""
    server = server or make_keys()
    given = options(public_key=server.public, secret_key=server.secret, allowed=[client.public, *friends], **more)
    ready, other = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=run_warehouse, args=(given, other), daemon=True)
    process.start()
    other.close()
    assert ready.poll(180), "the warehouse did not start"
    return Process(given, process, Peer(ready.recv(), server.public), client)


@contextmanager
def warehouse(client: Keys, **more: Any) -> Iterator[Process]:
    running = start_warehouse(client, **more)
    try:
        yield running
    finally:
        running.stop()
