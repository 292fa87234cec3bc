"""From the sampler to tickets: what comes next, how far it has been delivered, and the way back to any such place."""
