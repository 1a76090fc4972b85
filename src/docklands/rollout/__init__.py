"""Floor 5: generation. A batched engine over a paged KV cache, and the worker that plays episodes with it."""

from docklands.rollout.episode import RolloutWorker
from docklands.rollout.native import NativeEngine
from docklands.rollout.sampling import sample_seed

__all__ = ["NativeEngine", "RolloutWorker", "sample_seed"]
