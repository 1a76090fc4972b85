"""Floor 2: parallel layouts (pure arithmetic), meshes of process groups, collectives, and what is built from them."""

from docklands.parallel.layout import Layout

__all__ = ["Layout"]
