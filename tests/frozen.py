"""The last that the server of forks.py loads: what it has loaded is never garbage, and no child looks through it."""

from __future__ import annotations

import gc

gc.freeze()
