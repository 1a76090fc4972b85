"""Docklands: reinforcement-learning training for large language models, as a dataflow over a table."""

__version__ = "0.1.0"
