"""The cost model and the simulation: sums worked out by hand, invariants of the loop, and runs measured here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docklands.algorithms import build_algorithm
from docklands.cli.main import run
from docklands.config.load import load_config, make_config
from docklands.errors import ConfigError
from docklands.models.catalog import active_params, catalog
from docklands.parallel.layout import Layout
from docklands.run.cost_model import Generation, Links, Training, size_of, work_of
from docklands.run.forecast import Case, Dock, busy_seconds, forecast
from docklands.run.hardware import HARDWARE, Hardware, find_hardware, from_dict, read_hardware
from docklands.run.lengths import Lengths, read_lengths
from docklands.run.plan import model_of, parse_transfer, plan_run
from docklands.run.simulate import Flow, Group, Simulated, Simulation
from docklands.run.simulate_generation import Generators

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).parents[1] / "data" / "cost_model.json"
PLAIN = Hardware("plain", flops=1e12, memory=1e12, capacity=1e12, link=1e9, network=1e8, host=1e9, latency=0.0)
EXACT = replace(PLAIN, forward=1.0, train=1.0, decode=1.0, stream=1.0, step=0.0, row=0.0, prefill=0.0, call=0.0,
                sample=0.0, micro=0.0, update=0.0)  # fmt: skip
QWEN = size_of(catalog.get("qwen2.5-7b"))


# --- costs ----------------------------------------------------------------------------------------------------------


def test_flops_of_a_token_are_twice_its_parameters() -> None:
    """7.616 B parameters, of which the embedding (152,064 x 3,584) costs nothing; attention 4 x heads x size a pair."""
    assert QWEN.active == pytest.approx(7.616e9 - 152064 * 3584, rel=1e-3)
    training = Training(QWEN, Layout(), EXACT, 2, 10**9)
    assert training.flops(1000, 0) == pytest.approx(2000 * QWEN.active)
    assert training.flops(0, 1) == 28 * 28 * 4 * 128
    moe = catalog.get("qwen3-30b-a3b")
    assert size_of(moe).active == pytest.approx(active_params(moe) - 151936 * 2048, rel=1e-6)


def test_an_update_is_three_forward_passes_and_adam() -> None:
    training = Training(QWEN, Layout(), EXACT, 2, 10**9)
    forward = training.forward([1000.0], [0.0])
    adam = 28 * (QWEN.dense) / 1e12
    assert training.update([1000.0], [0.0]) == pytest.approx(3 * forward + adam)
    full = replace(training, recompute="full")
    assert full.update([1000.0], [0.0]) == pytest.approx(4 * forward + adam)


def test_a_pipeline_idles_while_it_fills() -> None:
    """pp 4 and 8 micro-batches: 3 of 11 slots are idle; interleaving halves them."""
    training = Training(QWEN, Layout(pp=4), EXACT, 2, 100)
    assert training.bubble_share([800.0], [0.0]) == pytest.approx(3 / 11)
    assert replace(training, layout=Layout(pp=4, vpp=2)).bubble_share([800.0], [0.0]) == pytest.approx(1.5 / 9.5)
    each = training.forward([100.0], [0.0]) / 4
    assert training.forward([800.0], [0.0]) == pytest.approx(11 * each)


def test_collectives_by_hand() -> None:
    """1 GB between 4 devices of a node at 1 GB/s: 3/4 s to gather, twice that to reduce; ten times over the network."""
    links = Links(EXACT)
    assert links.gather(1e9, 4, 4) == pytest.approx(0.75) and links.reduce(1e9, 4, 4) == pytest.approx(1.5)
    assert links.gather(1e9, 4, 16) == pytest.approx(7.5) and links.gather(1e9, 1, 1) == 0


def test_decoding_reads_weights_and_cache() -> None:
    """One sequence: 15.2 GB at 1 TB/s less the embedding; many: arithmetic; latent attention and tp read less."""
    one = Generation(QWEN, Layout(), replace(EXACT, flops=1e15), 2)
    assert one.step(1, 0) == pytest.approx(2 * QWEN.dense / 1e12)
    assert one.step(1, 10**6) - one.step(1, 0) == pytest.approx(28 * 2 * 4 * 128 * 2 * 1e6 / 1e12)
    assert one.step(4096, 0) == pytest.approx(2 * QWEN.active * 4096 / 1e15)
    two = Generation(QWEN, Layout(tp=2), replace(EXACT, flops=1e15, link=1e15), 2)
    assert two.step(1, 1000) == pytest.approx(one.step(1, 1000) / 2, rel=1e-3)
    moe = size_of(catalog.get("qwen3-30b-a3b"))
    spread = Generation(moe, Layout(dp=8, ep=8), EXACT, 2)
    assert spread.weights(0) < spread.weights(1) < spread.weights(64) <= 2 * (moe.dense + moe.routed / 8)


def test_work_of_a_group() -> None:
    """Prompt 10, responses 2 and 4: shared 16 tokens, apart 26."""
    responses = np.array([2.0, 4.0])
    assert work_of(10, responses, True) == (16.0, 2 * 10 + 2 + 4 * 10 + 8 + 50)
    assert work_of(10, responses, False) == (26.0, 2 * 10 + 2 + 4 * 10 + 8 + 100)


def test_the_docks_formula() -> None:
    """Bytes over S endpoints, metadata over one; the central buffer is S = 1."""
    graph = build_algorithm(make_config()[0]).graph()
    group = Group(0, 100.0, np.full(8, 300.0), {})
    central, spread = (Dock(graph, count, 1e9, 64.0) for count in (1, 16))
    moved = central.moved("update", 100.0, group.responses)
    assert moved == 8 * (8 + 400 * (4 + 1 + 4) + 4)  # group id, ids + mask + log-probs of 400 tokens, advantage
    assert central.seconds("update", [group]) == pytest.approx((moved + 8 * 64) / 1e9)
    assert spread.seconds("update", [group]) == pytest.approx((moved / 16 + 8 * 64) / 1e9)


# --- the simulation -------------------------------------------------------------------------------------------------


class Fixed:
    """Every stage one second, an update three, publishing half of one; a decode step one second."""

    publish, swap_in = 0.5, 0.0

    def stage(self, name: str, groups: Sequence[Group]) -> float:
        return 1.0

    def update(self, learner: str, groups: Sequence[Group]) -> float:
        return 3.0

    def step(self, rows: float, context: float) -> float:
        return 1.0

    def prefill(self, tokens: float) -> float:
        return 0.0


def simulated(tokens: Sequence[float] = (10.0,), slots: int = 99, replicas: int = 1, **changes: Any) -> Simulated:
    """2 prompts of 2 samples a step, lengths in turn."""
    config, _ = make_config({"algorithm": changes.pop("algorithm", {})})
    stale = changes.pop("staleness", 0)
    flow = Flow(build_algorithm(config).graph(), 2, 2 * (stale + 1), 2, **changes)
    count = iter(range(10**9))

    def lengths(groups: int) -> tuple[np.ndarray, np.ndarray]:
        found = np.array([[tokens[next(count) % len(tokens)] for _ in range(2)] for _ in range(groups)])
        return np.full(groups, 5.0), found

    costs = Fixed()
    return Simulation(flow, costs, lengths, Generators(replicas, slots, costs)).run(6, warm=2)


def test_a_synchronous_step_is_the_sum_of_its_stages() -> None:
    """10 decode steps + reward 1 + advantage 1 + update 3 + publish 0.5; nothing waits, nothing overlaps."""
    found = simulated()
    assert [step.seconds for step in found.steps] == pytest.approx([15.5] * 6)
    assert found.busy["devices"] == pytest.approx({"rollout": 10.0, "update": 3.0, "publish": 0.5})
    assert found.steps[0].tokens == 2 * 2 * 15 and found.steps[0].samples == 4 and found.active == pytest.approx(1.0)
    assert busy_seconds(found) == pytest.approx(15.5)


def test_stages_that_share_the_devices_wait_in_turn() -> None:
    """Old and reference log-probs are ready together: one waits for the other; reward and advantage run beside."""
    found = simulated(algorithm={"kl": {"coef": 0.1}, "samples_per_update": 64})
    assert found.seconds == pytest.approx(10 + 2 + 3 + 0.5)
    assert sorted(found.waits[name] for name in ("old_logprobs", "ref_logprobs")) == pytest.approx([0.0, 1.0])


def test_disaggregated_and_one_step_stale_overlap() -> None:
    """Generation (10 s) hides reward, advantage and update (5 s); publishing stops both: 10.5 s a step."""
    apart = simulated(apart=True)
    assert apart.seconds == pytest.approx(15.5) and apart.share("trainers") < 0.25
    found = simulated(apart=True, staleness=1)
    assert found.seconds == pytest.approx(10.5)
    assert found.share("generators") == pytest.approx(1.0, abs=0.06)


def test_slots_and_replicas() -> None:
    """Four samples of 10 on two slots take two rounds; on two replicas one."""
    assert simulated(slots=2).seconds == pytest.approx(25.5)
    assert simulated(slots=2, replicas=2).seconds == pytest.approx(15.5)


def test_the_tail_of_long_samples() -> None:
    """Lengths 10 and 100 on two replicas: each decodes 100 steps when a long one is on each; of one replica, one."""
    found = simulated((10.0, 10.0, 10.0, 100.0), replicas=4)
    assert found.seconds == pytest.approx(105.5)
    assert found.active == pytest.approx((3 * 10 + 100) / 400)


def test_partial_rollouts() -> None:
    """A visit ends after 25 tokens. A lone group of 100 comes back three times and takes what it took before; where one
    group of eight is long, the short ones go on meanwhile and the long ones of several steps decode together.
    """
    assert simulated((100.0,), visit=25).total("rollout") == pytest.approx(100.0)
    graph, costs, random = build_algorithm(make_config()[0]).graph(), Fixed(), np.random.default_rng(0)

    def lengths(groups: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(groups, 5.0), np.where(random.random(groups) < 1 / 8, 200.0, 10.0)[:, None].repeat(2, 1)

    def time(visit: int) -> float:
        flow = Flow(graph, 8, 24, 8, fixed=False, visit=visit)
        return Simulation(flow, costs, lengths, Generators(1, 99, costs)).run(20, warm=4).seconds

    assert time(25) < 0.6 * time(0)


def test_dropped_groups_are_made_anew() -> None:
    graph = build_algorithm(make_config({"algorithm": {"name": "dapo"}})[0]).graph()
    costs = Fixed()

    def time(dropped: float) -> float:
        flow = Flow(graph, 4, 4, 4, fixed=False, dropped=dropped)
        lengths = lambda groups: (np.full(groups, 5.0), np.full((groups, 2), 10.0))  # noqa: E731
        return Simulation(flow, costs, lengths, Generators(1, 99, costs), seed=3).run(12).seconds

    assert time(0.0) < time(0.4) < 3 * time(0.0)


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "configs").glob("mix6_*.yaml")))
def test_every_recipes_graph_runs_to_its_end(recipe: str) -> None:
    """The flow never stands still, each step has its samples, and no resource is held for longer than there is time."""
    config, _ = load_config(ROOT / "configs" / f"{recipe}.yaml")
    machine = replace(PLAIN, capacity=2**34)
    memory = plan_run(config, model_of(config), None, parse_transfer(""), 2**34)
    for stale, visit in ((0, 0), (1, 0), (1, 4))[: 1 if config.algorithm.name == "dpo" else 3]:
        changed = config.model_copy(update={
            "dock": config.dock.model_copy(update={"max_staleness": stale}),
            "rollout": config.rollout.model_copy(update={"partial_tokens": visit}),
        })  # fmt: skip
        found = forecast(changed, memory, Case(machine, Lengths(7.0, 7.0, 16), steps=3))
        assert [step.samples for step in found.simulated.steps] == [config.samples_per_step] * 3
        assert all(found.simulated.share(name) <= 1 + 1e-6 for name in found.simulated.busy)
        assert "a step takes" in found.to_text()


# --- against runs ---------------------------------------------------------------------------------------------------


def recorded() -> list[dict[str, Any]]:
    return json.loads(RECORDED.read_text(encoding="utf-8"))["runs"]


@pytest.mark.parametrize("recipe", sorted({row["recipe"] for row in recorded()}))
def test_predictions_are_within_a_fifth_of_what_was_measured(recipe: str) -> None:
    """Figures of bench/cost_model.py --record: the machine's own calibration, the run's lengths, its CPU seconds."""
    ratios = []
    for row in (row for row in recorded() if row["recipe"] == recipe):
        config, _ = load_config(ROOT / "configs" / f"{recipe}.yaml", ["run.threads=1"])
        machine = from_dict(row["hardware"], "recorded")
        lengths = Lengths(**{**row["lengths"], "responses": tuple(row["lengths"]["responses"])})
        shape = catalog_or(config, row)
        memory = plan_run(config, shape, None, parse_transfer(""), int(machine.capacity))
        ratios.append(busy_seconds(forecast(config, memory, Case(machine, lengths)).simulated) / row["measured"])
    assert 0.8 < float(np.median(ratios)) < 1.2, ratios


def catalog_or(config: Any, row: dict[str, Any]) -> Any:
    """The model of the recipe: its files, or (not on this machine) its shape as recorded."""
    from docklands.models.config import ModelConfig

    return (
        ModelConfig(**{**row["model"], "eos_ids": tuple(row["model"]["eos_ids"])})
        if "model" in row
        else model_of(config)
    )


# --- what users write -----------------------------------------------------------------------------------------------


def test_hardware_files(tmp_path: Path) -> None:
    for name in ("h100", "ascend-910b", "ascend-910c"):
        machine = HARDWARE.get(name)
        path = tmp_path / f"{name}.yaml"
        path.write_text(machine.to_yaml(), encoding="utf-8")
        assert read_hardware(path) == machine == find_hardware(name) == find_hardware(str(path))
        assert {"shares", "host"} <= set(machine.sources)
    plain = "name: x\nflops: 1\nmemory: 1\ncapacity: 1\n"
    for content, message in (
        ("name: x\n", "missing: flops"),
        ("name: x\nflops: 1\nmemory: 1\ncapacity: 1\nspeed: 3\n", "unknown: speed"),
        ("name: x\nflops: fast\nmemory: 1\ncapacity: 1\n", "flops is 'fast'"),
        ("name: x\nflops: 0\nmemory: 1\ncapacity: 1\n", "flops is 0"),
        (f"{plain}node: 2.5\n", "node is 2.5"),
        (f"{plain}server: 0\n", "server is 0"),
        (f"{plain}forward: 7\n", "forward is 7"),
        (f"{plain}stream: 50\n", "stream is 50"),
        ("name: x\nflops: 1\nmemory: 1\ncapacity: 0.1\n", "capacity is 0.1"),
        ("name: [1]\nflops: 1\nmemory: 1\ncapacity: 1\n", "name is"),
        (f"{plain}sources: 3\n", "sources is 3"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_hardware(path)


def test_lengths_in_words() -> None:
    config, _ = make_config({"rollout": {"max_response_tokens": 1000}})
    random = np.random.default_rng(0)
    found = read_lengths("lognormal:mean=100,max=900,sigma=1.5,prompt=20", config)
    prompts, responses = found.draw(500, 8, random)
    assert set(prompts) == {20.0} and responses.max() <= 900 and responses.min() >= 1
    assert 80 < responses.mean() < 105 and np.median(responses) < 0.5 * responses.mean()
    assert read_lengths("fixed:tokens=7", config).draw(2, 2, random)[1].tolist() == [[7, 7], [7, 7]]
    for wrong in ("lognormal:max=3", "lognormal:mean=x", "fixed:tokens=2000", "lognormal:mean=0", "nowhere/run"):
        with pytest.raises(ConfigError, match="--lengths"):
            read_lengths(wrong, config)


def test_the_command_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "rollout: {layout: {tp: 2}, prompts_per_step: 8, max_batch: 64}\nlayout: {tp: 4, fsdp: 2}\n"
        "sync: {swap: host}\ntrain: {dtype: bfloat16, recompute: true}\n"
    )
    words = ["plan", str(file), "--model", "qwen2.5-7b", "--hardware", "h100", "--lengths", "lognormal:mean=200"]
    assert run(words) == 0
    said = capsys.readouterr().out
    assert "generation: dp4 tp2" in said and "predicted on 8 x h100, colocated" in said and "short: devices" in said
    assert (
        run([*words, "fleet.placement=disaggregated", "sync.swap=none", "rollout.layout.dp=2", "dock.max_staleness=1"])
        == 0
    )
    said = capsys.readouterr().out
    assert "predicted on 12 x h100, apart, max_staleness 1" in said and "trainers" in said
    assert (
        run([*words[:4], "--device-gib", "80", "--dropped", "0.5"]) == 2
        and "name the machine" in capsys.readouterr().err
    )
    assert run([*words[:4], "--hardware", "abacus"]) == 2 and "abacus" in capsys.readouterr().err
    assert run([*words, "fleet.placement=disaggregated"]) == 2 and "nothing shares a device" in capsys.readouterr().err
