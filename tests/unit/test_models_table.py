"""The parameter table, building models, the registry and the device module."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from docklands import device, models
from docklands.errors import ConfigError
from docklands.models import ModelConfig, table_for

CONFIG = ModelConfig("Qwen3ForCausalLM", 40, 24, 2, 6, 2, 10, 20, qk_norm=True, qkv_bias=True, o_bias=True)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_table_names_every_parameter_with_its_shape(tied: bool, bias: bool) -> None:
    config = dataclasses.replace(CONFIG, tie_embeddings=tied, qkv_bias=bias, o_bias=bias)
    model = models.build(config, device="meta")
    stored = {spec.name: spec.shape for spec in model.table.stored()}
    assert stored == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert list(stored) == [name for name, _ in model.named_parameters()]
    assert config.num_params == sum(p.numel() for p in model.parameters())
    head = model.table.by_name("head.weight")
    assert head.tied_to == ("embed.weight" if tied else None)
    value = models.build_value(config, device="meta")
    assert [s.name for s in value.table.stored()] == [name for name, _ in value.named_parameters()]


def test_splits_cut_between_heads_and_inside_each_fused_part() -> None:
    table = table_for(CONFIG)
    qkv = table.by_name("layers.1.qkv.weight")
    assert (qkv.split, qkv.split_dim, qkv.unit, qkv.parts, qkv.layer) == ("column", 0, 10, (60, 20, 20), 1)
    assert [start for _, _, start in qkv.hf_shapes()] == [0, 60, 80]
    assert table.by_name("layers.0.gate_up.weight").parts == (20, 20)
    assert table.by_name("layers.0.o.weight").split_dim == 1 and table.by_name("embed.weight").split == "vocab"
    for spec in table:
        assert sum(spec.parts) == spec.shape[0]
        assert spec.split_dim is None or spec.shape[spec.split_dim] % spec.unit == 0
        assert all(rows % spec.unit == 0 for rows in spec.parts) or spec.split != "column"


def test_the_table_needs_no_torch() -> None:
    code = (
        "import torch; from docklands import device; cpu = device.choose('cpu'); "
        "before = device.memory_allocated(cpu); block = torch.ones(64 << 20, dtype=torch.uint8); "
        "print(device.memory_allocated(cpu) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=180)
    assert int(done.stdout) > 0.9 * (64 << 20)


def test_device() -> None:
    cpu = device.choose("cpu")
    assert str(cpu) == "cpu" and not cpu.is_accelerator and str(device.Device("cuda", 3)) == "cuda:3"
    assert device.current().type == device.available()[0] and device.available()[-1] == "cpu"
    device.synchronize(cpu)
    assert 0 < device.rss() < device.memory_capacity(cpu)
    with pytest.raises(ConfigError, match="device 'tpu' is not available here"):
        device.choose("tpu")


KEEP = """
import resource, torch
from docklands import device
torch.set_num_threads(1)
kept = device.keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(4_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(int(kept), faults())
"""


@pytest.mark.slow
def test_freed_memory_is_kept() -> None:
    done = subprocess.run([sys.executable, "-c", KEEP], capture_output=True, text=True, timeout=180, check=True)
    kept, faults = map(int, done.stdout.split())
    assert not kept or faults < 1000  # 78,000 pages are touched
