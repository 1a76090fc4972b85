"""The parameter table, building models, the registry and the device module."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from docklands import device, models
from docklands.errors import ConfigError
from docklands.models import ModelConfig, PackedCausal, table_for
from docklands.registry import Registry, import_string

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
        "import sys, importlib.util as u, types\n"
        "package = types.ModuleType('docklands.models')\n"
        "import docklands, pathlib\n"
        "package.__path__ = [str(pathlib.Path(docklands.__file__).parent / 'models')]\n"
        "sys.modules['docklands.models'] = package\n"
        "from docklands.models.params import table_for\n"
        "from docklands.models.config import ModelConfig\n"
        "assert len(table_for(ModelConfig('LlamaForCausalLM', 40, 24, 2, 6, 2, 10, 20)))\n"
        "import docklands.registry, docklands.device\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_build_is_reproducible_and_seeded() -> None:
    a, b, c = (models.build(CONFIG, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    assert not torch.equal(a.embed.weight, c.embed.weight)
    assert torch.equal(a.get_parameter("layers.0.qkv.weight"), b.get_parameter("layers.0.qkv.weight"))
    assert a.embed.weight.std().item() == pytest.approx(0.02, rel=0.1)
    half = models.build(CONFIG, seed=1, dtype=torch.bfloat16)
    assert torch.equal(half.embed.weight, a.embed.weight.bfloat16())
    assert all(p.isfinite().all() for p in a.parameters())


def test_an_empty_pack_gives_no_states() -> None:
    model = models.build(CONFIG, seed=1)
    none_T = torch.zeros(0, dtype=torch.long)
    assert model(none_T, none_T, PackedCausal([])).shape == (0, 24)


def test_config_travels_through_hf_unchanged() -> None:
    rule = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    for config in (
        CONFIG,
        ModelConfig("LlamaForCausalLM", 40, 24, 2, 6, 2, 10, 20, rope_scaling=rule, eos_ids=(1, 2), bos_id=0, pad_id=3),
        ModelConfig("Qwen2ForCausalLM", 40, 24, 2, 6, 2, 4, 20, qkv_bias=True, tie_embeddings=True, rope_theta=1e6),
    ):
        assert ModelConfig.from_hf(config.to_hf()) == config


def test_registry_suggests_the_nearest_name() -> None:
    registry: Registry[str] = Registry("reward")
    registry.add("exact_match", "exact")("the thing")
    assert registry.get("exact") == registry.get("exact_match") == "the thing"
    assert registry.names() == ["exact", "exact_match"] and "exact" in registry and "none" not in registry
    with pytest.raises(ConfigError, match=r"unknown reward 'exakt_match' .*did you mean 'exact_match'"):
        registry.get("exakt_match")
    with pytest.raises(ConfigError, match=r"known: exact, exact_match"):
        registry.get("zzz")
    with pytest.raises(ConfigError, match="registered twice"):
        registry.add("exact")("another")


def test_import_strings() -> None:
    assert import_string("math:sqrt") is __import__("math").sqrt
    assert Registry[object]("reward").get("os.path:join") is __import__("os").path.join
    for name, part in {
        "nowhere.at.all:x": "No module named 'nowhere'",
        "math:sqr": "did you mean 'sqrt'",
        "math:": "package.module:attribute",
    }.items():
        with pytest.raises(ConfigError, match=part):
            import_string(name, "reward")


def test_allocated_memory_grows_with_a_tensor() -> None:
    """In a process of its own: here the allocator may still hold freed memory of earlier tests."""
    code = (
        "import torch; from docklands import device; cpu = device.choose('cpu'); "
        "before = device.memory_allocated(cpu); block = torch.ones(64 << 20, dtype=torch.uint8); print(device.memory_allocated(cpu) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
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
    done = subprocess.run([sys.executable, "-c", KEEP], capture_output=True, text=True, timeout=60, check=True)
    kept, faults = map(int, done.stdout.split())
    assert not kept or faults < 1000  # 78,000 pages are touched
