"""The four workloads, through this loader and its peers: the same transforms, cores and steps."""
