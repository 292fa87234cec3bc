"""The sampler's keys as tickets: the next ones, those delivered, and snapshots to go on from."""
