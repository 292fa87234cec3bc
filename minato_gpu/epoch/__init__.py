"""One epoch of a loader as the training loop sees it, and what outlives an epoch."""
