"""Sources of samples' bytes: their declaration by data sets, reading ahead, and caches."""
