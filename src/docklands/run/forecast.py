"""How long a step will take, and what it waits for: the cost model and the simulation, put together for a config.

Legend: B samples, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from docklands.algorithms import build_algorithm
from docklands.config.schema import Config
from docklands.core.fields import Field
from docklands.core.graph import UPDATE, Graph
from docklands.parallel.layout import Layout
from docklands.run.cost_model import Generation, Training, size_of, work_of
from docklands.run.hardware import Hardware
from docklands.run.lengths import Lengths
from docklands.run.plan import ITEMSIZE, MemoryPlan, kv_bytes_per_token
from docklands.run.simulate import DEVICES, GENERATORS, ON_DEVICE, TRAINERS, Flow, Group, Simulated, Simulation
from docklands.run.simulate_generation import Generators

JSON_BYTES = 256
"""Of a column of text or of a row's own data, a sample: assumed."""
SIZES = {"int64": 8, "int32": 4, "float32": 4, "int16": 2, "bfloat16": 2, "int8": 1, "bool": 1, "json": JSON_BYTES}


@dataclass(frozen=True)
class Case:
    """What is simulated besides the config: see `docklands plan`. steps: after the warm-up."""

    hardware: Hardware
    lengths: Lengths
    steps: int = 8
    seed: int = 0
    dropped: float = 0.0


class Dock:
    """Bytes of a stage's columns (SYSTEM.md, formula R8): B bytes over S endpoints of W bytes/s, metadata a row.

    warehouses  S; speed: W; metadata: bytes a row and stage that the control process gets
    """

    def __init__(self, graph: Graph, warehouses: int, speed: float, metadata: float = 64.0) -> None:
        self.graph, self.warehouses, self.speed, self.metadata = graph, warehouses, speed, metadata
        self._rates = {stage.name: rates((*stage.reads, *stage.writes)) for stage in graph.stages}

    def moved(self, stage: str, prompt: float, responses: np.ndarray) -> float:
        """Bytes that a stage reads and writes of one group."""
        sample, per_prompt, per_token = self._rates[stage]
        count = len(responses)
        return count * (sample + per_prompt * prompt) + per_token * (count * prompt + float(responses.sum()))

    def seconds(self, stage: str, groups: Sequence[Group]) -> float:
        size = sum(self.moved(stage, group.prompt, group.responses) for group in groups)
        rows = sum(len(group.responses) for group in groups)
        return size / (self.warehouses * self.speed) + rows * self.metadata / self.speed


def rates(columns: Sequence[Field]) -> tuple[float, float, float]:
    """Bytes of these columns: of a sample, of a token of its prompt, of a token of prompt and response."""
    found = [0.0, 0.0, 0.0]
    for column in columns:
        kind = 2 if column.is_token else 1 if column.is_ragged else 0
        found[kind] += SIZES.get(column.dtype, 4) * math.prod(column.inner_shape)
    return found[0], found[1], found[2]


class StageCosts:
    """Seconds of every stage but generation, for the simulation."""

    def __init__(self, config: Config, training: Training, plan: MemoryPlan, dock: Dock, distinct: float) -> None:
        self.config, self.graph, self.training, self.dock = config, dock.graph, training, dock
        self.distinct = distinct
        hard = training.hardware
        self.publish, self.swapped = publish_seconds(plan, hard), 0.0
        if config.sync.swap != "none" and not plan.reshard.options.apart:
            self.swapped = plan.swapped / (hard.host * hard.stream)
        self.publish += self.swapped + hard.call

    @property
    def swap_in(self) -> float:
        return self.swapped

    def stage(self, name: str, groups: Sequence[Group]) -> float:
        """A forward pass of the training layout, or a cheap function of each sample."""
        hard, stage = self.training.hardware, self.graph[name]
        moved = self.dock.seconds(name, groups) + hard.call
        if stage.role in ON_DEVICE:
            return self.training.forward(*self.units(groups)) + moved
        return hard.sample * sum(len(group.responses) for group in groups) + moved

    def update(self, learner: str, groups: Sequence[Group]) -> float:
        """All optimizer updates of a step."""
        costs, pairs = self.units(groups)
        count = self.config.updates_per_step // self.config.algorithm.epochs_per_step
        total, each = 0.0, max(1, len(groups) // count)
        for part in range(count):
            some = slice(part * each, (part + 1) * each) if count <= len(groups) else slice(0, 1)
            scale = 1.0 if count <= len(groups) else len(groups) / count
            total += self.training.update([c * scale for c in costs[some]], [p * scale for p in pairs[some]])
        return total * self.config.algorithm.epochs_per_step + self.dock.seconds(UPDATE, groups)

    def units(self, groups: Sequence[Group]) -> tuple[list[float], list[float]]:
        """(tokens, pairs) of each group; where prompts are not shared, of each sample."""
        shared = self.config.train.share_prefix
        if shared:
            works = [work_of(group.prompt, group.responses, True) for group in groups]
        else:
            works = [work_of(g.prompt, np.array([length]), False) for g in groups for length in g.responses]
        return [self.distinct * tokens for tokens, _ in works], [self.distinct * pairs for _, pairs in works]


def publish_seconds(plan: MemoryPlan, hardware: Hardware) -> float:
    """The busiest device's bytes of the real plan over its links; what stays on a device is copied in its memory."""
    reshard, links = plan.reshard, plan.reshard.links()
    sent, received = reshard.traffic()
    busiest = float(max(sent.max(), received.max()))
    between = links.between / links.total if links.total and hardware.node < reshard.devices else 0.0
    speed = hardware.stream / ((1 - between) / hardware.link + between / hardware.network)
    copied = 2 * links.device / reshard.devices / (hardware.memory * hardware.stream)
    return busiest / speed + copied + hardware.latency * reshard.steps


@dataclass(frozen=True)
class Forecast:
    """What the simulation found."""

    config: Config
    case: Case
    graph: Graph
    simulated: Simulated
    devices: int
    replicas: int
    slots: int
    bubble: float

    @property
    def throughput(self) -> float:
        """Tokens of prompts and responses a second and device."""
        return self.simulated.tokens / self.simulated.seconds / self.devices

    @property
    def short(self) -> str:
        """The resource that is held most of the time, and by what."""
        found = self.simulated
        name = max(found.busy, key=found.share)
        stage = max(found.busy[name], key=lambda key: found.busy[name][key])
        return f"{name} ({100 * found.share(name):.0f} % of the time; most for {stage})"

    def to_text(self) -> str:
        """What `docklands plan` prints below memory."""
        found, hard = self.simulated, self.case.hardware
        times = [step.seconds for step in found.steps]
        mode = "apart" if TRAINERS in found.busy else "colocated"
        lines = [
            f"predicted on {self.devices} x {hard.name}, {mode}, max_staleness {self.config.dock.max_staleness}"
            + (f", {self.config.rollout.partial_tokens} tokens a visit" if self.config.rollout.partial_tokens else ""),
            f"lengths {self.case.lengths}",
            f"generation: {self.replicas} replicas of {self.slots} sequences at once",
            f"a step takes {seconds(found.seconds)} ({seconds(min(times))} to {seconds(max(times))} over {len(times)} "
            f"simulated): {self.throughput:,.0f} tokens/s a device, "
            f"{found.steps[0].samples / found.seconds:,.2f} samples/s",
            "",
            "stage".ljust(18)
            + "on".ljust(12)
            + "s a step".rjust(10)
            + "of the step".rjust(13)
            + "waits for it".rjust(14),
        ]
        for resource, stages in found.busy.items():
            for stage, busy in stages.items():
                row = stage.ljust(18) + resource.ljust(12) + seconds(busy).rjust(10)
                row += f"{100 * busy / found.seconds:.0f} %".rjust(13)
                lines.append(row + (seconds(found.waits[stage]).rjust(14) if stage in found.waits else ""))
        idle = [name for name in (DEVICES, GENERATORS, TRAINERS) if name in found.busy]
        idle_text = ", ".join(f"{name} {100 * max(0.0, 1 - found.share(name)):.0f} %" for name in idle)
        lines += [
            "",
            f"idle: {idle_text}; of generation {100 * (1 - found.active):.0f} % is the tail of long samples; pipeline "
            f"bubbles {100 * self.bubble:.0f} % of an update",
            f"short: {self.short}",
        ]
        return "\n".join(lines)


def busy_seconds(found: Simulated) -> float:
    """Work of a step, whoever does it and whenever: on one thread, its CPU seconds."""
    return sum(sum(stages.values()) for stages in found.busy.values())


def seconds(value: float) -> str:
    """Three figures."""
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def forecast(config: Config, plan: MemoryPlan, case: Case) -> Forecast:
    """Simulate the config's own graph on the plan's layouts. ConfigError, LayoutError."""
    graph = build_algorithm(config).graph()
    hard, model, reshard = case.hardware, plan.model, plan.reshard
    size, itemsize = size_of(model), ITEMSIZE[config.train.dtype]
    section = config.train
    training = Training(size, reshard.source, hard, itemsize, section.tokens_per_microbatch, section.recompute)
    generation = Generation(size, reshard.target, hard, reshard.options.itemsize)
    apart = reshard.options.apart
    warehouses = max(config.dock.warehouses, -(-reshard.devices // hard.server))
    dock = Dock(graph, warehouses, hard.endpoint)
    replicas = reshard.target.world_size // reshard.target.tp
    slots = sequences_at_once(config, plan, case.lengths, reshard.target)
    step = config.rollout.prompts_per_step
    flow = Flow(
        graph,
        step,
        (config.dock.max_staleness + 1) * step,
        config.dock.groups_per_take or step,
        fixed=config.dock.deterministic and not (apart and config.dock.max_staleness),
        apart=apart,
        visit=config.rollout.partial_tokens,
        dropped=case.dropped,
    )
    random = np.random.default_rng(case.seed)
    simulation = Simulation(
        flow,
        StageCosts(config, training, plan, dock, case.lengths.distinct),
        lambda groups: case.lengths.draw(groups, config.rollout.samples_per_prompt, random),
        Generators(replicas, slots, generation),
        case.seed,
    )
    found = simulation.run(case.steps, warm=1 + config.dock.max_staleness)
    mean = case.lengths.average()
    unit = work_of(case.lengths.prompt, np.full(config.rollout.samples_per_prompt, mean), section.share_prefix)
    share = config.samples_per_update / config.samples_per_step
    count = max(1, round(step * share))
    bubble = training.bubble_share([unit[0]] * count, [unit[1]] * count)
    return Forecast(config, case, graph, found, reshard.devices, replicas, slots, bubble)


def sequences_at_once(config: Config, plan: MemoryPlan, lengths: Lengths, layout: Layout) -> int:
    """Of a replica: what fits into the memory that the plan leaves, by the mean length (pages come as they fill)."""
    weights = plan.phases[-1].total - plan.phases[-1].parts.get("KV cache", 0)  # with what rests beside them
    each = kv_bytes_per_token(plan.model, layout) * plan.reshard.options.itemsize
    room = max(0, plan.capacity - weights) / each
    if config.rollout.kv_cache_tokens:
        room = min(room, config.rollout.kv_cache_tokens)
    return max(1, min(config.rollout.max_batch, int(room / (lengths.prompt + lengths.average()))))
