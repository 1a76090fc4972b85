"""Floor 1: fields, batches, stages, graphs and the protocols between the parts."""
