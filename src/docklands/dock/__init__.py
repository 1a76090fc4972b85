"""Floor 4: the transfer dock, the sample flow between stages. See docs/concepts/transfer_dock.md."""

from docklands.dock.dock import Dock, ThreadClient
from docklands.dock.rules.options import DockOptions

__all__ = ["Dock", "DockOptions", "ThreadClient"]
