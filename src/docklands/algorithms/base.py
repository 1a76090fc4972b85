"""What an algorithm is: a dataflow graph and two pure functions, advantage and loss.

A subclass says which keys of `config.algorithm` it reads and what its own values are. A key that it does not read must
keep its default: a number that nothing reads is a wish that nothing grants.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from docklands.algorithms.check import check_config
from docklands.algorithms.functional import Aggregation
from docklands.config.schema import Config
from docklands.core.batch import Batch, Packed
from docklands.core.graph import Graph
from docklands.core.loss import Denominators, LossResult, ModelOutput
from docklands.core.stage import Result
from docklands.errors import CheckpointError, ConfigError
from docklands.registry import Registry

ALGORITHMS: Registry[type[Algorithm]] = Registry(
    "algorithm",
    tuple(
        f"docklands.algorithms.{name}"
        for name in ("grpo", "dapo", "ppo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo", "sft", "dpo", "distill")
    ),
)
"""Algorithms by name. A user's own is "package.module:Class", a subclass of Algorithm."""


@dataclass(frozen=True)
class Own:
    """An algorithm's own values, used where the config says null or auto."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = "token_mean"
    normalize_std: bool = True
    filter_groups: bool = False


class Algorithm(ABC):
    """Config + graph + advantage + loss. Picklable: other processes run its functions.

    reads        keys of `config.algorithm` that it reads, beside the ones that every run reads
    own          its own values of keys that may be null or auto
    needs_group  its estimator compares the samples of a prompt, so it needs at least two
    learns_from  "samples" of the policy; or given "demonstrations" or "preferences"
    reads_reference  it needs the reference model whatever `kl.coef` is
    Raises ConfigError for a config that contradicts the algorithm.
    """

    reads: ClassVar[frozenset[str]] = frozenset()
    own: ClassVar[Own] = Own()
    needs_group: ClassVar[bool] = False
    has_critic: ClassVar[bool] = False
    single_update: ClassVar[bool] = False
    learns_from: ClassVar[str] = "samples"
    reads_reference: ClassVar[bool] = False

    def __init__(self, config: Config) -> None:
        self.config = config
        self.section = config.algorithm
        self.name = config.algorithm.name
        chosen = config.algorithm.aggregation
        self.aggregation: Aggregation = self.own.aggregation if chosen == "auto" else chosen
        self.check()

    def check(self) -> None:
        """Refuse contradictions (see docklands.algorithms.check). A subclass may add its own."""
        check_config(self)

    @abstractmethod
    def graph(self) -> Graph:
        """Stages and learners, checked."""

    @abstractmethod
    def loss(self, packed: Packed, out: ModelOutput, denominators: Denominators) -> LossResult:
        """The actor's loss over one micro-batch."""

    def advantage(self, batch: Batch) -> Batch | Result | None:
        """What the advantage stage writes."""
        raise ConfigError(f"algorithm {self.name!r} has no advantage stage")

    def filter_groups(self, batch: Batch) -> Result:
        """What the filter stage keeps and drops."""
        raise ConfigError(f"algorithm {self.name!r} has no filter stage")

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know; {} for a stateless algorithm."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError when the state is another algorithm's."""
        if state:
            raise CheckpointError(f"algorithm {self.name!r} keeps no state, the checkpoint has {sorted(state)}")

    def pick(self, key: str) -> Any:
        """The config's value of `key`, or the algorithm's own where the config says null."""
        value = getattr(self.section, key)
        return getattr(self.own, key) if value is None else value


def build_algorithm(config: Config) -> Algorithm:
    """The algorithm that `config.algorithm.name` names. Raises ConfigError."""
    made = ALGORITHMS.get(config.algorithm.name)
    if not (isinstance(made, type) and issubclass(made, Algorithm)):
        raise ConfigError(
            f"algorithm {config.algorithm.name!r} is not an algorithm: {made!r}",
            "name a subclass of docklands.algorithms.Algorithm",
        )
    return made(config)
