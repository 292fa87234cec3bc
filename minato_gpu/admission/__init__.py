"""From the sampler to tickets."""
