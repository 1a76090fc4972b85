"""Figures of this machine for the cost model, by micro-benchmarks on the config's own model with random weights.

On a CPU with one thread seconds are CPU seconds, so that other jobs on the machine change little; elsewhere they are
wall-clock seconds.

Legend: T tokens, D model, B samples.
"""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from docklands import models
from docklands.algorithms import build_algorithm
from docklands.config.schema import Config
from docklands.core.batch import Batch, Jagged
from docklands.core.fields import GROUP_ID, LOSS_MASK, TOKEN_IDS
from docklands.core.protocols import Request, Sampling
from docklands.core.stage import Learner
from docklands.device import choose, memory_capacity
from docklands.models.config import ModelConfig
from docklands.obs.files import iter_jsonl
from docklands.parallel.layout import Layout
from docklands.rollout import NativeEngine
from docklands.run.cost_model import OPTIMIZER_BYTES, Generation, Training, size_of, work_of
from docklands.run.forecast import Case, busy_seconds, forecast
from docklands.run.hardware import Hardware
from docklands.run.lengths import Lengths, read_lengths
from docklands.run.plan import ITEMSIZE, plan_run
from docklands.run.simulate import ON_DEVICE
from docklands.sync.plan import Options
from docklands.train.engine import TrainEngine

ROUNDS = 5
STEPS = 5
GROUP = 8


def calibrate(config: Config, model: ModelConfig) -> Hardware:
    """Products, memory, forward passes, updates and decode steps of one process. Takes seconds for a small model."""
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    device = choose(config.run.device)
    where = str(device)
    clock = time.process_time if not device.is_accelerator and torch.get_num_threads() == 1 else time.perf_counter
    stream = memory_speed(where, clock)
    found = Hardware(
        name=f"this machine ({platform.machine()}, {torch.get_num_threads()} threads)",
        flops=product_speed(model, getattr(torch, config.train.dtype), where, clock),
        memory=stream,
        capacity=memory_capacity(device),
        node=1,
        link=stream,
        network=stream,
        host=stream,
        endpoint=stream,
        latency=0.0,
        stream=1.0,
        step=0.0,
        row=0.0,
        prefill=0.0,
        micro=0.0,
        update=0.0,
        call=1e-3,
        sample=2e-5,
        sources={
            "all": f"measured {time.strftime('%Y-%m-%d')} by `docklands plan --calibrate`, "
            f"{'CPU' if clock is time.process_time else 'wall-clock'} seconds"
        },
    )
    trained = training_figures(found, config, model, where, clock)
    generated = generation_figures(trained, config, model, where, clock)
    return loop_figures(generated, config, model) if config.data.source and not config.has_workers else generated


def median(what: Callable[[], object], clock: Callable[[], float], rounds: int = ROUNDS) -> float:
    """Seconds of a call; the first one is not counted."""
    what()
    found = []
    for _ in range(rounds):
        began = clock()
        what()
        found.append(clock() - began)
    return max(statistics.median(found), 1e-9)


def memory_speed(where: str, clock: Callable[[], float]) -> float:
    """Bytes/s of a copy of 128 MB, read and written."""
    source = torch.ones(32 << 20, device=where)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median(lambda: target.copy_(source).sum().item(), clock)


def product_speed(model: ModelConfig, dtype: torch.dtype, where: str, clock: Callable[[], float]) -> float:
    """FLOP/s of the feed-forward product on 512 tokens."""
    width = model.moe.expert_size if model.moe else model.intermediate_size
    x_TD = torch.randn(512, model.hidden_size, device=where).to(dtype)
    weight = torch.randn(width, model.hidden_size, device=where).to(dtype)
    with torch.inference_mode():
        return 2 * 512 * weight.numel() / median(lambda: F.linear(x_TD, weight)[0, 0].item(), clock)


# --- training -----------------------------------------------------------------------------------------------------


def training_figures(
    base: Hardware, config: Config, model: ModelConfig, where: str, clock: Callable[[], float]
) -> Hardware:
    """`forward`, `micro`, `train`, `update`, `token`: two sizes of a batch, a line through them."""
    engine = TrainEngine(models.build(model, device=where, seed=0), config.train, config.train.optim, total_updates=100)
    learner = build_algorithm(config).graph().learners[0]
    response = min(config.rollout.max_response_tokens, 64)
    prompt = min(config.data.max_prompt_tokens, 32)
    small, large = (made_up(learner, model, count, prompt, response) for count in (2, 12))
    size = size_of(model)
    plain = Training(size, Layout(), base, ITEMSIZE[config.train.dtype], config.train.tokens_per_microbatch)
    works = [units(count, prompt, response) for count in (2, 12)]
    flops = [plain.flops(tokens, pairs) for tokens, pairs in works]
    counts = [len(plain.microbatches([tokens], [pairs])) for tokens, pairs in works]
    forward = [median(lambda b=b: engine.logprobs(b), clock) for b in (small, large)]
    speed, micro = line(flops, forward, counts)
    update = [median(lambda b=b: engine.update(b, learner), clock) for b in (small, large)]
    adam = OPTIMIZER_BYTES * sum(p.numel() for p in engine.model.parameters()) / base.memory
    pace, rest = line([3 * f for f in flops], [u - adam - 3 * micro * c for u, c in zip(update, counts)], [1, 1])
    peak = max(base.flops, speed, pace)  # the product alone may have been slower than a whole pass
    return replace(base, flops=peak, forward=speed / peak, micro=micro, train=pace / peak, update=rest)


def line(work: Sequence[float], taken: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    """(work a second, fixed seconds a count) through two points; a fixed part below 0 is none."""
    rate = (work[1] - work[0]) / max(taken[1] - taken[0], 1e-9)
    fixed = (taken[0] - work[0] / rate) / counts[0]
    if fixed < 0:
        return work[1] / taken[1], 0.0
    return rate, fixed


def units(groups: int, prompt: int, response: int) -> tuple[float, float]:
    """(tokens, pairs) of so many groups."""
    tokens, pairs = work_of(prompt, np.full(GROUP, float(response)), shared=True)
    return groups * tokens, groups * pairs


def made_up(learner: Learner, model: ModelConfig, groups: int, prompt: int, response: int) -> Batch:
    """Random samples with the columns that a learner reads; the samples of a group share their prompt."""
    random = np.random.default_rng(0)
    rows, length = groups * GROUP, prompt + response
    tokens = random.integers(0, model.vocab_size, (rows, length))
    tokens[:, :prompt] = np.repeat(tokens[::GROUP, :prompt], GROUP, axis=0)
    mask = np.zeros((rows, length), bool)
    mask[:, prompt:] = True
    columns = {}
    for field in learner.reads:
        if field == TOKEN_IDS:
            value = jagged(torch.from_numpy(tokens.astype(np.int32)))
        elif field == LOSS_MASK:
            value = jagged(torch.from_numpy(mask))
        elif field == GROUP_ID:
            value = torch.arange(groups).repeat_interleave(GROUP)
        elif field.is_token:
            value = jagged(-torch.rand(rows, length, *field.inner_shape))
        else:
            value = torch.randn(rows, *field.inner_shape)
        columns[field] = value
    return Batch(np.arange(rows), columns)


def jagged(values: torch.Tensor) -> Jagged:
    """Rows of one length."""
    rows, length = values.shape[:2]
    return Jagged(values.flatten(0, 1), np.arange(0, (rows + 1) * length, length))


# --- generation ---------------------------------------------------------------------------------------------------


def generation_figures(
    base: Hardware, config: Config, model: ModelConfig, where: str, clock: Callable[[], float]
) -> Hardware:
    """`step`, `row`, `prefill`: few and many sequences, short and long."""
    name = config.train.dtype if config.rollout.dtype == "auto" else config.rollout.dtype
    engine = NativeEngine(model, config.rollout, dtype=getattr(torch, name), device=where)
    source = models.build(model, device=where, seed=0)
    engine.load_weights(((n, p.detach()) for n, p in source.named_parameters()), version=0)
    prompt = min(config.data.max_prompt_tokens, 32)
    most = min(config.rollout.max_batch, config.samples_per_step)
    few, long = max(1, most // 8), min(config.rollout.max_response_tokens, 32)
    short = max(1, long // 4)

    def taken(rows: int, tokens: int) -> float:
        return median(lambda: engine.generate(list(requests(rows, tokens, prompt, model.vocab_size))), clock, 3)

    times = {(rows, tokens): taken(rows, tokens) for rows in (few, most) for tokens in (short, long)}
    per_step = {rows: (times[rows, long] - times[rows, short]) / max(1, long - short) for rows in (few, most)}
    hard = replace(base, decode=base.forward)
    plain = Generation(size_of(model), Layout(), hard, ITEMSIZE[name])
    left = {rows: max(0.0, per_step[rows] - plain.step(rows, rows * (prompt + long / 2))) for rows in (few, most)}
    row = max(0.0, (left[most] - left[few]) / max(1, most - few))
    groups = max(1, most // GROUP)
    start = max(0.0, times[most, long] - long * per_step[most]) / groups
    prefill = max(0.0, start - plain.prefill(prompt))
    return replace(hard, step=max(0.0, left[most] - row * most), row=row, prefill=prefill)


def requests(rows: int, tokens: int, prompt: int, vocabulary: int) -> Iterator[Request]:
    """Samples of exactly so many tokens; groups share a prompt."""
    random = np.random.default_rng(1)
    prompts = random.integers(0, vocabulary, (-(-rows // GROUP), prompt)).tolist()
    for index in range(rows):
        yield Request(tuple(prompts[index // GROUP]), Sampling(tokens), seed=index, request_id=index)


# --- the loop around them -----------------------------------------------------------------------------------------


def loop_figures(base: Hardware, config: Config, model: ModelConfig) -> Hardware:
    """`call`, `sample`: two short runs of the config with random weights and few tokens, less what the engines take.

    What is left is the dock, the reward, text, metrics and files; it is put on the stages' calls and their samples.
    """
    plain = replace(base, call=0.0, sample=0.0)
    graph = build_algorithm(config).graph()
    hosted = sum(stage.role not in ON_DEVICE for stage in graph.stages)
    prompts = sorted({max(1, config.rollout.prompts_per_step // 8), config.rollout.prompts_per_step})
    if len(prompts) == 1:
        prompts.append(2 * prompts[0])
    left, rows = [], []
    for count in prompts:
        short = shortened(config, count)
        taken, lengths = short_run(short)
        memory = plan_run(short, model, None, Options(), int(base.capacity))
        expected = forecast(short, memory, Case(plain, lengths, steps=4)).simulated
        left.append(max(0.0, taken - busy_seconds(expected)))
        rows.append(short.samples_per_step)
    sample = max(0.0, (left[1] - left[0]) / (rows[1] - rows[0]))
    call = max(0.0, left[1] - sample * rows[1])
    return replace(base, call=float(call) / (len(graph.stages) - 1), sample=float(sample) / max(1, hosted))


def shortened(config: Config, prompts: int) -> Config:
    """The config with few tokens, no evaluation and no files that cost."""
    data = config.model_dump(mode="json")
    data["run"].update(steps=STEPS, name="calibration")
    data["model"]["init"] = "random"
    data["rollout"].update(prompts_per_step=prompts, max_response_tokens=4, min_response_tokens=0)
    data["algorithm"].update(samples_per_update=0, overlong_buffer_tokens=0, overlong_penalty=1.0)
    data["dock"]["groups_per_take"] = 0
    data["eval"].update(before=False, after=False, prompts=0)
    data["checkpoint"].update(at_end=False, every_steps=0)
    data["obs"].update(console="off", report=False, tensorboard=False, wandb="")
    return Config.model_validate(data)


def short_run(config: Config) -> tuple[float, Lengths]:
    """(seconds of a step, what it trained). CPU seconds where the process has one thread, as above."""
    from docklands.run.main import train_run  # only here: plans without a run need no engines

    with tempfile.TemporaryDirectory() as folder:
        placed = config.model_copy(update={"run": config.run.model_copy(update={"dir": folder})})
        train_run(placed, {}, resume=False)
        steps = [row["metrics"] for row in iter_jsonl(Path(folder) / config.run.name / "metrics.jsonl")][2:]
        lengths = read_lengths(str(Path(folder) / config.run.name), config)
    name = "perf/cpu_s" if config.run.threads == 1 else "timing_s/step"
    return statistics.median(step[name] for step in steps), lengths
