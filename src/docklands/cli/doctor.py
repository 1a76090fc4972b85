"""docklands doctor: what this machine offers, one line each, ok or warn."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

GIB = 1 << 30
REQUIRED = ("numpy", "pydantic", "safetensors", "tokenizers", "transformers", "pyarrow", "gguf", "tensorboard")
TASKS = ("reasoning-gym", "math-verify")
OPTIONAL = {"datasets": "data sets on disk", "wandb": "Weights & Biases", "torch_npu": "Ascend NPUs"}
FLAGS = {"avx2": "vector maths", "avx512f": "wider vectors", "amx_bf16": "bf16 about twice as fast"}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    text: str
    ok: bool = True

    def __str__(self) -> str:
        return f"{'ok  ' if self.ok else 'warn'}  {self.name:<14} {self.text}"


def doctor() -> None:
    """Look at Python, torch, the processor, memory, disk, kernels and packages.

    Exits 0 also with warnings: they say what will be slow or missing, not that anything failed.
    """
    warnings = 0
    for probe in PROBES:
        for finding in probe():
            warnings += not finding.ok
            print(finding, flush=True)
    print(f"{warnings} warning{'' if warnings == 1 else 's'}")


def python() -> Iterator[Finding]:
    """The interpreter."""
    version = platform.python_version()
    yield Finding("python", f"{version}, {platform.system()} {platform.machine()}", sys.version_info >= (3, 11))


def torch_build() -> Iterator[Finding]:
    """torch and its threads."""
    if importlib.util.find_spec("torch") is None:
        yield Finding("torch", "not installed: pip install -r requirements/cpu.txt", False)
        return
    import torch

    yield Finding("torch", str(torch.__version__))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    note = "" if threads <= cores else " (more threads than cores: set run.threads)"
    yield Finding("threads", f"{threads} of torch on {cores} cores{note}", threads <= cores)


def devices() -> Iterator[Finding]:
    """What run.device: auto would choose."""
    from docklands import device

    yield Finding("device", f"auto -> {device.choose()}; usable: {', '.join(device.available())}")


def processor() -> Iterator[Finding]:
    """Instruction sets that the CPU path profits from."""
    if platform.machine() not in ("x86_64", "AMD64"):
        yield Finding("cpu", platform.machine())
        return
    have = cpu_flags()
    for flag, use in FLAGS.items():
        yield Finding("cpu", f"{flag} {'present' if flag in have else 'absent'} ({use})", flag in have)


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Flags of the first core; empty where the file does not exist."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())


def memory() -> Iterator[Finding]:
    """Main memory."""
    import psutil

    found = psutil.virtual_memory()
    enough = found.available >= 4 * GIB
    note = "" if enough else " (the quick start wants about 4 GiB)"
    yield Finding("memory", f"{found.available / GIB:.1f} GiB free of {found.total / GIB:.1f}{note}", enough)


def disk() -> Iterator[Finding]:
    """Room for runs here and for models in the cache."""
    from docklands.config.paths import cache_dir

    for name, path in (("disk: runs", Path.cwd()), ("disk: cache", cache_dir())):
        place = next(p for p in (path, *path.absolute().parents) if p.exists())
        free, writable = shutil.disk_usage(place).free, os.access(place, os.W_OK)
        text = f"{free / GIB:.1f} GiB free at {path}" + ("" if writable else " (not writable)")
        yield Finding(name, text, free >= 2 * GIB and writable)


def kernels() -> Iterator[Finding]:
    """Which paths the fused operations take on this machine."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    packed = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()
    yield Finding("kernels", f"oneDNN {'with' if packed else 'without'} pre-packed weights in generation", packed)
    from docklands import device, kernels

    kind = device.choose().type
    for module, operations in sorted(groupby_value(kernels.used(kind)).items()):
        what = {"cuda": "torch's fused CUDA", "npu": "torch_npu"}.get(module, f"reference ({module})")
        yield Finding("kernels", f"{kind}: {', '.join(operations)}: {what}")


def groupby_value(found: dict[str, str]) -> dict[str, list[str]]:
    """value -> its keys, in order."""
    grouped: dict[str, list[str]] = {}
    for key, value in found.items():
        grouped.setdefault(value, []).append(key)
    return grouped


def packages() -> Iterator[Finding]:
    """Installed versions; optional ones are no warning when absent."""
    for name in (*REQUIRED, *TASKS):
        version = version_of(name)
        yield Finding("package", f"{name} {version or 'is missing'}", version is not None)
    for name, use in OPTIONAL.items():
        yield Finding("optional", f"{name} {version_of(name) or 'not installed'} ({use})")


def version_of(package: str) -> str | None:
    """Version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def imported_models() -> Iterator[Finding]:
    """Models that configs can name as cache:NAME."""
    from docklands.config.paths import models_dir

    folder = models_dir()
    names = sorted(p.parent.name for p in folder.glob("*/config.json"))
    yield Finding("models", f"{', '.join(names) or 'none yet (docklands import gguf)'} in {folder}")


PROBES: tuple[Callable[[], Iterator[Finding]], ...] = (
    python,
    torch_build,
    devices,
    processor,
    memory,
    disk,
    kernels,
    packages,
    imported_models,
)
