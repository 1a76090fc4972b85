"""Memory savers: not a bit of the result changes, each really keeps less, and says how much."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.cases import MODELS
from tests.train_cases import ACTOR_WITH_ENTROPY, CRITIC, engine, gradients_of, largest_difference, sampled, tiny

from docklands.config.schema import OptimSection, TrainSection
from docklands.errors import SyncError
from docklands.models import ModelConfig, build
from docklands.models.savers import Saver
from docklands.sync.memory import FileTier
from docklands.train import TrainEngine, checkpoint, sharded_checkpoint
from docklands.train.offload import LAYERS_AT_ONCE, MIB, MOMENTS_AT_ONCE, Moments, most_at_once

SAVERS: list[dict[str, Any]] = [
    {"recompute": "selective"},
    {"recompute": "full"},
    {"activation_offload": True},
    {"recompute": "selective", "activation_offload": True},
    {"recompute": "full", "activation_offload": True},
]


def trainer_of(name: str, **train: Any) -> TrainEngine:
    """An engine on one of the small models, that offloads whatever the size."""
    model = build(ModelConfig.from_hf(MODELS[name]), seed=3)
    section = TrainSection(tokens_per_microbatch=60, **train)
    trainer = TrainEngine(model, section, OptimSection(lr=1e-2), max_tokens=8, total_updates=10)
    if trainer.saver is not None:
        trainer.saver.least = 0
    return trainer


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("train", SAVERS, ids=lambda s: "-".join(map(str, s.values())))
def test_savers_change_no_bit(name: str, train: dict[str, Any]) -> None:
    batch = sampled(seed=9)
    plain = gradients_of(trainer_of(name), batch, ACTOR_WITH_ENTROPY)
    trainer = trainer_of(name, **train)
    found = gradients_of(trainer, batch, ACTOR_WITH_ENTROPY)
    assert plain[0] == found[0] and largest_difference(plain[1], found[1]) == 0.0
    gc.collect()
    saver = trainer.saver
    assert (saver is None) == (train == {"recompute": "full"})
    if saver is not None:
        assert saver.away == 0  # every place is free again
        assert (saver.discarded > 0) == saver.selective
        assert (saver.peak > 0) == ("activation_offload" in train)
        assert not saver._offers and not saver._known


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_critic_trains_alike_with_everything_on(dtype: str) -> None:
    """Values, moments and masters after three updates; bf16 copies too."""
    plain = engine(value=True, dtype=dtype)
    saving = {"recompute": "selective", "activation_offload": True, "dtype": dtype}
    other = engine(value=True, optim=OptimSection(lr=1e-2, offload=True), **saving)
    for seed in range(3):
        a, b = plain.update(sampled(seed), CRITIC), other.update(sampled(seed), CRITIC)
        assert a == {key: value for key, value in b.items() if not key.endswith("_mib")}
    assert plain.optimizer is not None and other.optimizer is not None
    assert largest_difference(plain.masters(), other.masters()) == 0.0
    moments, ours = plain.optimizer.moments, other.optimizer.moments
    for slot in (0, 1):
        first, second = ({name: pair[slot] for name, pair in found.items()} for found in (moments, ours))
        assert largest_difference(first, second) == 0.0


def kept_bytes(trainer: TrainEngine) -> int:
    """Bytes that a graph holds beside parameters: storages that its saved tensors need, each once."""
    found: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    saver = trainer.model.saver
    if saver is not None:
        inner = saver._keep
        saver._keep = lambda tensor: inner(pack(tensor))  # type: ignore[method-assign]
    tokens, positions = torch.arange(40) % 61, torch.arange(40)
    from docklands.models import PackedCausal

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = trainer.model(tokens, positions, PackedCausal([40]))
    assert out.requires_grad
    return sum(found.values())


def test_selective_recomputation_keeps_neither_norms_nor_products() -> None:
    config = tiny().config
    plain, selective = kept_bytes(engine()), kept_bytes(engine(recompute="selective"))
    saved = config.num_layers * 40 * (2 * config.hidden_size + config.intermediate_size) * 4
    assert plain - selective == saved


def test_offloaded_activations_are_counted() -> None:
    trainer = engine(activation_offload=True)
    assert trainer.saver is not None
    trainer.saver.least = 0
    metrics = trainer.update(sampled(seed=1), ACTOR_WITH_ENTROPY)
    peak = metrics["actor/activations_offloaded_mib"][0]
    assert peak == trainer.saver.peak / MIB > 0 and trainer.saver.away == 0
    assert "actor/recompute_saved_mib" not in metrics
    trainer.saver.least = 1 << 30
    assert trainer.update(sampled(seed=1), ACTOR_WITH_ENTROPY)["actor/activations_offloaded_mib"][0] == 0.0


def test_one_place_for_a_tensor_that_is_saved_twice() -> None:
    tier = FileTier()
    saver = Saver(selective=False, lower=tier, least=0)
    layer = torch.nn.Identity()
    x = torch.randn(8, requires_grad=True)
    with saver.layer(layer):
        y = x * 2
        z = (y * y + y.sin()).sum()  # y three times
    assert saver.away == y.numel() * 4
    z.backward()
    assert torch.allclose(x.grad, (8 * x + 2 * (2 * x).cos()).detach())  # type: ignore[arg-type]
    del y, z
    gc.collect()
    assert saver.away == 0 and saver.peak == 32


def test_moments_rest_in_the_lower_tier_between_steps() -> None:
    trainer = engine(optim=OptimSection(lr=1e-2, offload=True))
    assert trainer.optimizer is not None
    resting, ledger = trainer.optimizer.resting, trainer.optimizer.resting.ledger
    assert ledger.of("device") == 0  # not even before the first step
    metrics = trainer.update(sampled(), ACTOR_WITH_ENTROPY)
    whole = 8 * sum(master.numel() for master in trainer.masters().values())
    largest = 8 * max(master.numel() for master in trainer.masters().values())
    assert (ledger.of("device"), ledger.of("disk")) == (0, whole)
    sizes = [8 * master.numel() for master in trainer.masters().values()]
    assert largest < ledger.peak("device") <= most_at_once(sizes, MOMENTS_AT_ONCE) < whole
    assert metrics["actor/optimizer_offloaded_mib"] == (whole / MIB, 1.0)
    assert trainer.state_dict()["optimizer"]["exp_avg"].keys() == trainer.masters().keys()
    assert ledger.of("device") == whole and resting.away_bytes == 0  # a checkpoint reads them
    trainer.update(sampled(1), ACTOR_WITH_ENTROPY)
    assert ledger.of("device") == 0
    assert engine().optimizer.resting.away_bytes == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("copy", [False, True])
def test_a_checkpoint_reads_and_writes_few_moments_at_once(copy: bool, tmp_path: Path) -> None:
    """The device never holds more than a step does, and they rest again."""
    first, second = (engine(optim=OptimSection(lr=1e-2, offload=True)) for _ in range(2))
    first.update(sampled(), ACTOR_WITH_ENTROPY)
    most = first.optimizer.resting.ledger.peak("device")  # type: ignore[union-attr]
    begun = checkpoint.begin(tmp_path, 1, {}, keep=2)
    sharded_checkpoint.Saving.of(begun, {"actor": first}, None, copy).write()
    sharded_checkpoint.load(begun.path, {"actor": second})
    for trainer in (first, second):
        assert trainer.optimizer is not None
        ledger = trainer.optimizer.resting.ledger
        assert ledger.of("device") == 0 < ledger.of("disk") and ledger.peak("device") <= most
    first.update(sampled(1), ACTOR_WITH_ENTROPY)
    second.update(sampled(1), ACTOR_WITH_ENTROPY)
    assert largest_difference(first.masters(), second.masters()) == 0.0


def test_a_checkpoint_goes_from_an_offloaded_optimizer_to_a_plain_one_and_back() -> None:
    first, straight = engine(optim=OptimSection(lr=1e-2, offload=True)), engine()
    for trainer in (first, straight):
        trainer.update(sampled(), ACTOR_WITH_ENTROPY)
    second = engine()
    second.load_state_dict(first.state_dict())
    third = engine(optim=OptimSection(lr=1e-2, offload=True))
    third.load_state_dict(second.state_dict())
    for trainer in (straight, second, third):
        trainer.update(sampled(1), ACTOR_WITH_ENTROPY)
    assert largest_difference(straight.masters(), second.masters()) == 0.0
    assert largest_difference(straight.masters(), third.masters()) == 0.0


def test_a_tensor_without_elements_rests_too() -> None:
    moments = Moments({"none": torch.zeros(0), "one": torch.zeros(3)}, FileTier())
    for name, (first, _) in moments.each(["none", "one"]):
        first.add_(float(name == "one"))
    moments.rest()
    assert torch.equal(moments.all()["one"][0], torch.ones(3)) and moments.all()["none"][0].shape == (0,)


class Gated(FileTier):
    """A tier whose copies wait for a gate; one that nobody opens in time is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[int, threading.Event] = {}
        self.written: list[int] = []
        self.threads: set[str] = set()

    def _pass(self, key: int) -> None:
        self.threads.add(threading.current_thread().name)
        if key in self.gates and not self.gates[key].wait(10):
            raise SyncError(f"nobody opened gate {key}")

    def write(self, key: int, data: torch.Tensor) -> None:
        self._pass(key)
        super().write(key, data)
        self.written.append(key)

    def read(self, key: int, data: torch.Tensor) -> None:
        self._pass(key)
        super().read(key, data)


def test_layers_are_computed_while_what_they_keep_goes_down_and_comes_up_ahead() -> None:
    tier = Gated()
    saver = Saver(selective=False, lower=tier, least=0)
    layers = [torch.nn.Tanh() for _ in range(4)]
    tier.gates = {1: threading.Event()}  # the first layer's tensor cannot go down yet
    leaf = torch.randn(8, requires_grad=True)
    x, ahead = leaf, []
    for layer in layers[:2]:
        with saver.layer(layer):
            x = layer(x)
        x.register_hook(lambda _: ahead.append(saver.ahead))
    assert tier.written == [] and saver.copies.waited == 0  # and two layers are done
    tier.gates[1].set()
    for layer in layers[2:]:
        with saver.layer(layer):
            x = layer(x)
        x.register_hook(lambda _: ahead.append(saver.ahead))
        assert tier.written[:1] == [1]  # a third layer waits for the first one's
    assert saver.away == 4 * 32
    x.sum().backward()
    assert saver.ahead == 3  # all but the last one's, which nobody can ask for ahead
    assert ahead == [0, 1, 2, 3]  # when a layer's backward pass begins, its own and no other's has been called up
    expected, wanted = leaf.detach().clone().requires_grad_(), torch.zeros(8)
    wanted = expected
    for layer in layers:
        wanted = layer(wanted)
    wanted.sum().backward()
    assert torch.equal(leaf.grad, expected.grad) and tier.threads == {"activations"}  # type: ignore[arg-type]


def test_plans_count_two_layers_and_three_parameters() -> None:
    assert most_at_once([5, 1, 9, 2], LAYERS_AT_ONCE) == 11
    assert most_at_once([5, 1, 9, 2], MOMENTS_AT_ONCE) == 15
    assert most_at_once([7], LAYERS_AT_ONCE) == 7 and most_at_once([], LAYERS_AT_ONCE) == 0


def test_a_copy_that_fails_is_raised_where_it_is_waited_for() -> None:
    tier = FileTier()
    tier.close()
    saver = Saver(selective=False, lower=tier, least=0)
    x = torch.randn(8, requires_grad=True)
    with pytest.raises(ValueError, match="closed file"):
        for layer in [torch.nn.Tanh() for _ in range(3)]:
            with saver.layer(layer):
                x = layer(x)


def test_an_update_of_the_engine_brings_activations_up_ahead() -> None:
    trainer = engine(activation_offload=True)
    assert trainer.saver is not None
    trainer.saver.least = 0
    trainer.update(sampled(), ACTOR_WITH_ENTROPY)
    assert trainer.saver.ahead > 0


def test_a_parameter_is_updated_while_its_neighbours_moments_move() -> None:
    tier = Gated()
    moments = Moments({name: torch.zeros(3) for name in "abc"}, tier)
    for _, (first, _) in moments.each("abc"):
        first.add_(1.0)
    moments.rest()
    keys = moments._keys
    tier.gates = {keys["b"]: threading.Event()}
    steps = moments.each("abc")
    name, _ = next(steps)
    assert name == "a"  # b is on its way up, behind its gate
    tier.gates[keys["b"]].set()
    tier.gates[keys["a"]] = threading.Event()
    name, (first, _) = next(steps)
    assert name == "b" and torch.equal(first, torch.ones(3))  # a on its way down, behind its gate
    tier.gates[keys["a"]].set()
    assert [name for name, _ in steps] == ["c"]
    moments.rest()
    assert moments.ledger.of("device") == 0 and tier.threads == {"moments"}


@pytest.mark.parametrize("given,kept", [(True, "full"), (False, "none"), ("selective", "selective")])
def test_recompute_takes_the_old_flag(given: Any, kept: str) -> None:
    assert TrainSection(recompute=given).recompute == kept
