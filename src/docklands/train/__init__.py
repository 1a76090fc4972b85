"""Floor 5: the train engine. Four verbs (forward, forward_backward, optim_step, save/load), checkpoints beside them."""

from docklands.train.engine import TrainEngine

__all__ = ["TrainEngine"]
