"""Seconds of each phase from FLOPs, bytes and links: what `simulate.py` runs the graph with.

Legend: T tokens, D model, L layers, N heads, K kv heads, E experts, V vocabulary, R sequences decoded at once.

A phase takes the larger of its arithmetic (FLOPs / reached FLOP/s) and its memory traffic (bytes / reached bytes/s),
and then its collectives: none is assumed to hide behind arithmetic, but the weights' traffic of FSDP. The counting
follows the usual formulas: 2 FLOPs a parameter and token forward, twice that backward (arXiv 2001.08361), attention
by real lengths, and a decode step that reads all weights it touches and every sequence's KV cache once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from docklands.models.config import ModelConfig
from docklands.models.params import table_for
from docklands.parallel.layout import Layout
from docklands.run.hardware import Hardware
from docklands.run.plan import kv_bytes_per_token

BACKWARD = 2
"""Backward costs twice the forward."""
OPTIMIZER_BYTES = 4 * 7
"""Of AdamW, a parameter: master, gradient and two moments read, three written, 4 bytes each."""


@dataclass(frozen=True)
class Size:
    """What a model costs, whole.

    dense, routed   parameters that every token meets, and those of all routed experts (embedding left out, head in)
    top, experts    routed experts of a token, and in all, of a layer; sparse: layers with experts
    pair            FLOPs of one token attending to one other, all layers; absorbed: in a decode step (latent attention)
    """

    model: ModelConfig
    dense: int
    routed: int
    top: int
    experts: int
    sparse: int
    pair: float
    absorbed: float

    @property
    def active(self) -> float:
        """Parameters that one token meets."""
        return self.dense + self.routed * (self.top / self.experts if self.experts else 0)


def size_of(model: ModelConfig) -> Size:
    """By the parameter table."""
    dense = routed = 0
    for spec in table_for(model).stored():
        count = math.prod(spec.shape)
        if spec.experts:
            routed += count
        elif "embed" not in spec.name or model.tie_embeddings:
            dense += count
    mla, heads = model.mla, model.num_heads
    qk, v = model.head_dim, mla.v_dim if mla else model.head_dim
    pair = 2.0 * model.num_layers * heads * (qk + v)
    absorbed = 2.0 * model.num_layers * heads * (2 * mla.kv_rank + mla.rope_dim) if mla else pair
    moe = model.moe
    sparse = sum(moe.is_sparse(layer) for layer in range(model.num_layers)) if moe else 0
    top, experts = (moe.top_k, moe.experts) if moe and sparse else (0, 0)
    return Size(model, dense, routed, top, experts, sparse, pair, absorbed)


@dataclass(frozen=True)
class Links:
    """Collectives of one device. Ring and pairwise algorithms: the bytes that one device sends."""

    hardware: Hardware

    def speed(self, span: int) -> float:
        """Bytes/s of a device in a group that spans so many consecutive ranks."""
        inside = span <= self.hardware.node
        return self.hardware.stream * (self.hardware.link if inside else self.hardware.network)

    def reduce(self, size: float, group: int, span: int) -> float:
        """All-reduce of `size` bytes: a reduce-scatter and an all-gather."""
        return 2 * self.gather(size, group, span)

    def gather(self, size: float, group: int, span: int) -> float:
        """All-gather to, or reduce-scatter of, `size` bytes in all."""
        if group <= 1:
            return 0.0
        return size * (group - 1) / group / self.speed(span) + self.hardware.latency * math.log2(group)

    def exchange(self, size: float, group: int, span: int) -> float:
        """All-to-all in which a device holds `size` bytes."""
        return self.gather(size, group, span)


@dataclass(frozen=True)
class Training:
    """Forward passes and updates in a training layout.

    itemsize  bytes of the compute dtype; cap: tokens of a micro-batch; recompute: none, selective or full
    """

    size: Size
    layout: Layout
    hardware: Hardware
    itemsize: int
    cap: int
    recompute: str = "none"

    @cached_property
    def links(self) -> Links:
        return Links(self.hardware)

    def flops(self, tokens: float, pairs: float) -> float:
        """Forward, of one device: its share of layers, of heads and columns, and of a row's tokens."""
        split = self.layout.tp * self.layout.pp * self.layout.cp
        return (2 * self.size.active * tokens + self.size.pair * pairs) / split

    def collectives(self, tokens: float) -> float:
        """Seconds of a forward micro-batch of one stage: tensor parallel, experts, context parallel."""
        x, model = self.layout, self.size.model
        layers = model.num_layers / x.pp
        held = tokens / x.cp * model.hidden_size * self.itemsize
        tensor = 2 * layers * self.links.reduce(held, x.tp, x.tp)
        width = x.ep * x.etp
        moved = held / (x.tp if x.sp else 1) * self.size.top
        experts = 2 * self.size.sparse / x.pp * self.links.exchange(moved, x.ep, width)
        context = layers * 2 * self.links.exchange(held / x.tp * 2, x.cp, x.cp * x.tp)
        return tensor + experts + context

    def shards(self) -> float:
        """Seconds in which one device gathers its stage's parameters from their FSDP shards once."""
        x = self.layout
        if x.fsdp == 1:
            return 0.0
        dense = self.size.dense / (x.tp * x.pp) * self.itemsize
        routed = self.size.routed / (x.ep * x.etp * x.pp) * self.itemsize
        inside = max(1, x.fsdp * x.tp * x.cp // (x.ep * x.etp))
        return self.links.gather(dense, x.fsdp, x.fsdp * x.cp * x.tp) + self.links.gather(
            routed, inside, x.fsdp * x.cp * x.tp
        )

    def microbatches(self, costs: Sequence[float], pairs: Sequence[float]) -> list[tuple[float, float]]:
        """(tokens, pairs) of each micro-batch of the fullest data rank; units go to the emptiest, longest first."""
        ranks = self.layout.data
        order = np.argsort(-np.asarray(costs, float), kind="stable")
        held = np.zeros((ranks, 2))
        for unit in order:
            held[held[:, 0].argmin()] += (costs[unit], pairs[unit])
        tokens, pair = held[held[:, 0].argmax()]
        count = max(1, math.ceil(tokens / self.cap - 1e-9))
        return [(tokens / count, pair / count)] * count

    def forward(self, costs: Sequence[float], pairs: Sequence[float]) -> float:
        """Log-probs (or values) of these units of work: tokens through the model, and pairs that attend."""
        parts = self.microbatches(costs, pairs)
        each = [self._forward(tokens, pair) for tokens, pair in parts]
        return sum(each) + self._bubble(each)

    def _forward(self, tokens: float, pairs: float) -> float:
        work = self.flops(tokens, pairs) / (self.hardware.flops * self.hardware.forward)
        return max(work, self.shards()) + self.collectives(tokens) + self.hardware.micro

    def update(self, costs: Sequence[float], pairs: Sequence[float]) -> float:
        """One optimizer update: forward, backward, gradients summed, AdamW."""
        x, hard = self.layout, self.hardware
        passes = 1 + BACKWARD + (1 if self.recompute == "full" else 0.1 if self.recompute == "selective" else 0)
        each = []
        for tokens, pair in self.microbatches(costs, pairs):
            work = passes * self.flops(tokens, pair) / (hard.flops * hard.train) + hard.token * tokens
            moves = (passes - BACKWARD + 2) * self.shards()
            each.append(max(work, moves) + passes * self.collectives(tokens) + (1 + BACKWARD) * hard.micro)
        local = self.size.dense / (x.tp * x.pp) + self.size.routed / (x.ep * x.etp * x.pp)
        gradients = self.links.reduce(4 * local / x.fsdp, x.dp, x.inner_size)
        adam = OPTIMIZER_BYTES * local / x.fsdp / (hard.memory * hard.stream)
        return sum(each) + self._bubble(each) + gradients + adam + hard.update

    def _bubble(self, each: Sequence[float]) -> float:
        """Idle time of a stage while the pipeline fills and drains (Narayanan et al., arXiv 2104.04473)."""
        share = 1 / 3 if self.layout.schedule == "zero_bubble" else 1.0
        return share * (self.layout.pp - 1) / self.layout.vpp * max(each)

    def bubble_share(self, costs: Sequence[float], pairs: Sequence[float]) -> float:
        """Part of an update in which a pipeline stage is idle."""
        count = len(self.microbatches(costs, pairs))
        idle = (self.layout.pp - 1) / self.layout.vpp * (1 / 3 if self.layout.schedule == "zero_bubble" else 1.0)
        return idle / (count + idle)


@dataclass(frozen=True)
class Generation:
    """Decode steps and prefills in a generation layout.

    itemsize  bytes of a weight and of a cache entry
    """

    size: Size
    layout: Layout
    hardware: Hardware
    itemsize: int

    @cached_property
    def links(self) -> Links:
        return Links(self.hardware)

    @cached_property
    def kv(self) -> float:
        """Cache bytes of a token on one device."""
        return kv_bytes_per_token(self.size.model, self.layout) * self.itemsize

    def weights(self, rows: float) -> float:
        """Bytes of weights that a step with so many sequences on each replica reads on one device."""
        x, size = self.layout, self.size
        read = size.dense / x.tp
        if size.experts:
            per_rank = size.experts / x.ep
            together = rows * x.ep * x.etp / x.tp  # sequences of all replicas whose tokens meet these experts
            touched = 1 - (1 - size.top / size.experts) ** max(together, 0.0)
            read += size.routed / size.experts / x.etp * per_rank * touched
        return read * self.itemsize

    def step(self, rows: float, context: float) -> float:
        """Seconds of one decode step. rows: sequences on a replica; context: tokens in their caches, all together."""
        x, hard, model = self.layout, self.hardware, self.size.model
        flops = (2 * self.size.active * rows + self.size.absorbed * context) / x.tp
        read = self.weights(rows) + self.kv * context
        work = max(flops / (hard.flops * hard.decode), read / (hard.memory * hard.stream))
        held = rows * model.hidden_size * self.itemsize
        tensor = 2 * model.num_layers * self.links.reduce(held, x.tp, x.tp)
        experts = 2 * self.size.sparse * self.links.exchange(held / x.tp * self.size.top, x.ep, x.ep * x.etp)
        return work + tensor + experts + hard.step + hard.row * rows

    def prefill(self, tokens: float) -> float:
        """Seconds of a prompt of so many tokens."""
        x, hard, model = self.layout, self.hardware, self.size.model
        flops = (2 * self.size.active * tokens + self.size.pair * tokens * tokens / 2) / x.tp
        held = tokens * model.hidden_size * self.itemsize
        tensor = 2 * model.num_layers * self.links.reduce(held, x.tp, x.tp)
        return flops / (hard.flops * hard.forward) + tensor + hard.prefill


def work_of(prompt: float, responses: np.ndarray, shared: bool) -> tuple[float, float]:
    """(tokens through the model, attending pairs) of a group; shared: its prompt is computed once."""
    count = len(responses)
    tokens = responses.sum() + prompt * (1 if shared else count)
    own = responses * prompt + responses * responses / 2
    pairs = own.sum() + prompt * prompt / 2 * (1 if shared else count)
    return float(tokens), float(pairs)
