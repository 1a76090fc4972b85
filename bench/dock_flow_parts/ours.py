"""Our side: warehouse processes with keys on the loopback. Option: COUNT, or COUNT,tcp without shared memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src"), str(Path(__file__).resolve().parents[1])]

from dock_flow_parts.flow import Column, side  # noqa: E402
from docklands.core.batch import Batch, Jagged, offsets_of  # noqa: E402
from docklands.core.fields import REF_LOGPROBS, REWARD, ROLLOUT_LOGPROBS, TOKEN_IDS, Field  # noqa: E402
from docklands.dock import wire_messages as m  # noqa: E402
from docklands.dock.warehouse_client import ClientOptions, WarehouseClient  # noqa: E402
from docklands.dock.warehouse_store import WarehouseOptions  # noqa: E402
from docklands.dock.wire import column_meta  # noqa: E402
from docklands.dock.wire_net import Peer, make_keys  # noqa: E402

FIELDS: dict[str, Field] = {field.name: field for field in (TOKEN_IDS, ROLLOUT_LOGPROBS, REF_LOGPROBS, REWARD)}
STAGES = ("rollout", "ref", "reward", "actor")


class Ours:
    """One client per stage, as each stage is a process of its own in a real run. Whole chunks lie in one warehouse."""

    def __init__(self, option: str) -> None:
        count, _, kind = option.partition(",")
        self._places = int(count)
        client = make_keys()
        self._processes: list[subprocess.Popen[bytes]] = []
        peers = {}
        for place in range(self._places):
            server = make_keys()
            options = WarehouseOptions(
                place=place,
                columns=[column_meta(field) for field in FIELDS.values()],
                readers={"token_ids": ["ref", "reward"], "ref_logprobs": ["actor"], "reward": ["actor"]},
                run="bench",
                public_key=server.public,
                secret_key=server.secret,
                allowed=[client.public],
            )
            command = [sys.executable, "-m", "docklands.dock.warehouse_server", "-"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._processes.append(process)
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(msgspec.json.encode(options))
            process.stdin.close()
            peers[place] = Peer(json.loads(process.stdout.readline())["endpoint"], server.public)
        settings = ClientOptions(share=kind != "tcp")
        self._clients = {stage: WarehouseClient(peers, client, settings) for stage in STAGES}
        self._born: dict[int, list[int]] = {}
        self._chunks: dict[int, int] = {}

    def put(self, stage: str, start: int, stop: int, columns: Mapping[str, Column]) -> None:
        place = self._chunks.setdefault(start, len(self._chunks) % self._places)
        values = {FIELDS[name]: column_of(column) for name, column in columns.items()}
        birth = m.Birth(start, start, place) if stage == "rollout" else None
        self._clients[stage].put(Batch(np.arange(start, stop), values), place, birth, stage)

    def get(self, stage: str, start: int, stop: int, names: Sequence[str]) -> Mapping[str, np.ndarray]:
        place = self._chunks[max(first for first in self._chunks if first <= start)]
        batch = self._clients[stage].get(np.arange(start, stop), place, [FIELDS[name] for name in names], stage)
        return {name: values_of(batch[FIELDS[name]]) for name in names}

    def clear(self, rows: int) -> None:
        ids = np.arange(rows)
        for place in range(self._places):
            self._clients["actor"].free(ids, place)
        self._chunks.clear()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        for process in self._processes:
            process.terminate()
            process.wait(20)


def column_of(column: Column) -> Jagged | torch.Tensor:
    values = torch.from_numpy(column.values)
    return values if column.lengths is None else Jagged(values, offsets_of(column.lengths))


def values_of(column: Jagged | torch.Tensor) -> np.ndarray:
    return (column.values if isinstance(column, Jagged) else column).numpy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    side(Ours, sys.argv[1:])
