"""What a device and its links can do: figures of published machines with their sources, or of this one, measured.

Units: FLOP/s, bytes, bytes/s, seconds. A figure of a published machine is its data sheet's; the shares that programs
reach of it are assumptions, and say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from docklands.config import yaml_io
from docklands.errors import ConfigError
from docklands.registry import Registry

TERA, GIGA, GIB = 1e12, 1e9, 1 << 30
WORDS = {"name": (str, "a text"), "sources": (Mapping, "lines `figure: where it comes from`")}
COUNTS = ("node", "server", "capacity")
RATES = ("flops", "memory", "link", "network", "host", "endpoint", "forward", "train", "decode")
SHARES = ("forward", "train", "decode", "stream")
MOST_SHARE = 2.0
"""A measured machine's `flops` is what one product reached: a whole pass may reach more (1.18 was seen)."""


@dataclass(frozen=True)
class Hardware:
    """One kind of device, in nodes.

    flops        dense products in the compute dtype
    memory       of the device's own memory; capacity: its size
    node         devices of a node (or of one domain of fast links); server: of one host, which holds a warehouse
    link         of one device to others of its node, one direction; network: to other nodes
    host         between device and host, one direction
    endpoint     of one process that serves the dock's rows
    latency      of one collective or message
    forward, train   share of `flops` that a forward pass and a forward+backward reach
    decode       share of `flops` in a decode step where it is bound by arithmetic
    stream       share of `memory` and of the links that is reached
    step         fixed cost of a decode step; row: of each sequence in it; prefill: of a prompt's own pass
    call         of a stage's call; sample: of a sample in a stage without a model
    micro        of a micro-batch, forward; update: of an optimizer update, beside its bytes
    token        of a token trained, beside its FLOPs (norms, masks, log-probs: what products do not count)
    sources      where figures come from
    """

    name: str
    flops: float
    memory: float
    capacity: float
    node: int = 8
    server: int = 8
    link: float = 100 * GIGA
    network: float = 25 * GIGA
    host: float = 20 * GIGA
    endpoint: float = 1 * GIGA
    latency: float = 1e-5
    forward: float = 0.5
    train: float = 0.4
    decode: float = 0.4
    stream: float = 0.7
    step: float = 1e-3
    row: float = 2e-6
    prefill: float = 1e-3
    call: float = 1e-2
    sample: float = 1e-4
    micro: float = 2e-3
    update: float = 2e-2
    token: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in fields(self):
            value, wanted = getattr(self, item.name), ""
            if item.name in WORDS:
                kind, text = WORDS[item.name]
                wanted = "" if isinstance(value, kind) else text
            elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
                wanted = "a number from 0, below 1e30"
            elif item.name in COUNTS and (value < 1 or value != int(value)):
                wanted = "a whole number from 1"
            elif item.name in RATES and value == 0:
                wanted = "every rate is above 0"
            elif item.name in SHARES and value > MOST_SHARE:
                wanted = f"a share, at most 1 (measured ones may come out higher, up to {MOST_SHARE:g})"
            if wanted:
                raise ConfigError(f"hardware {self.name}: {item.name} is {value!r}", wanted)

    def to_yaml(self) -> str:
        """As `read_hardware` reads it."""
        rows = {**asdict(self), "sources": dict(self.sources)}
        return "".join(f"{name}: {yaml_io.flow(value)}\n" for name, value in rows.items())


def read_hardware(path: Path) -> Hardware:
    """From a YAML file. ConfigError for what is no such file."""
    try:
        document = yaml_io.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    return from_dict(document.data, str(path))


def from_dict(data: Mapping[str, Any], where: str) -> Hardware:
    """ConfigError for an unknown or a missing figure."""
    known = {item.name for item in fields(Hardware)}
    unknown = [name for name in data if name not in known]
    missing = [name for name in ("name", "flops", "memory", "capacity") if name not in data]
    if unknown or missing:
        said = f"unknown: {', '.join(unknown)}" if unknown else f"missing: {', '.join(missing)}"
        raise ConfigError(f"{where}: hardware: {said}", f"figures: {', '.join(sorted(known))}")
    return Hardware(**data)


def find_hardware(name: str) -> Hardware:
    """A published machine by name, or a YAML file by its path."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return read_hardware(path)
    return HARDWARE.get(name)


ENDPOINT = "one process over ZeroMQ and TCP, 0.9 to 1.1 GB/s on this project's test machine (2026-11-29)"
ASSUMED = (
    "forward, train, decode, stream, step, row, call, ...: assumed (model FLOPs utilisation of 0.4 is what well-tuned "
    "training reports), not measured"
)

HARDWARE: Registry[Hardware] = Registry("hardware")
H100 = Hardware(
    name="h100",
    flops=989.4 * TERA,
    memory=3.35e12,
    capacity=80 * GIB,
    link=450 * GIGA,
    network=50 * GIGA,
    host=55 * GIGA,
    sources={
        "flops, memory, capacity, link": "NVIDIA H100 SXM5 data sheet: 989 TFLOP/s BF16 dense, 3.35 TB/s, 80 GB, "
        "NVLink 900 GB/s in both directions together",
        "network": "DGX H100 data sheet: a 400 Gb/s adapter for each GPU",
        "host": "PCIe 5.0 x16, 64 GB/s less protocol",
        "endpoint": ENDPOINT,
        "shares": ASSUMED,
    },
)
ASCEND_910C = Hardware(
    name="ascend-910c",
    flops=376 * TERA,
    memory=1.6e12,
    capacity=64 * GIB,
    node=384,
    server=16,
    link=196 * GIGA,
    network=25 * GIGA,
    host=25 * GIGA,
    sources={
        "flops, memory, capacity": "one die of an Ascend 910C, which systems count as one NPU: half of 752 "
        "TFLOP/s BF16, 3.2 TB/s and 128 GB (CloudMatrix384, arXiv 2506.12708; 3.2 TB/s also techpowerup.com/335749)",
        "server": "16 dies (hiascend.com, Atlas 900 A3 SuperPoD)",
        "link": "Unified Bus, 196 GB/s a die and direction, the whole super node one domain (arXiv 2506.12708)",
        "network": "200 Gb/s RDMA a die (arXiv 2506.12708)",
        "host": "assumed: PCIe 4.0 x16",
        "endpoint": ENDPOINT,
        "shares": ASSUMED,
    },
)
ASCEND_910B = replace(
    ASCEND_910C,
    name="ascend-910b",
    flops=320 * TERA,
    node=8,
    server=8,
    sources={
        "flops, capacity": "publicly reported: about 320 TFLOP/s FP16, 64 GB HBM2e (boardor.com/blog/"
        "huawei-ascend-910b-outperforms-h20-910c-approaches-h100); no data sheet of the maker was at hand",
        "memory, link": "assumed as a 910C's die, links within 8 devices of a server",
        "network": "assumed: 200 Gb/s RoCE a device",
        "host": "assumed: PCIe 4.0 x16",
        "endpoint": ENDPOINT,
        "shares": ASSUMED,
    },
)
for _hardware in (H100, ASCEND_910C, ASCEND_910B):
    HARDWARE.add(_hardware.name)(_hardware)
