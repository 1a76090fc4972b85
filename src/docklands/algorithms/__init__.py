"""Floor 5: algorithms. Each is a graph, an advantage and a loss, in one file, on the pure functions beside it."""

from docklands.algorithms.base import ALGORITHMS, Algorithm, Own, build_algorithm
from docklands.algorithms.policy import GroupAlgorithm, PolicyAlgorithm, PolicyInputs

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "GroupAlgorithm",
    "Own",
    "PolicyAlgorithm",
    "PolicyInputs",
    "build_algorithm",
]
