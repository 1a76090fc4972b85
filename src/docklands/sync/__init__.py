"""Floor 4: the resharding flow, from the training layout to the generation layout."""
