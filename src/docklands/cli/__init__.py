"""Floor 8: the `docklands` command."""

import os

PREPARED = 256
"""Products that oneDNN keeps prepared, one for each shape, and as many that torch does. By default they are 1,024, and
batches bring new shapes with every step: a trainer in bfloat16 on a CPU would grow by half a GiB in some hundred steps.
A step uses some dozens."""

for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):  # before torch is loaded; children inherit it
    os.environ.setdefault(name, str(PREPARED))
