"""Records of a run: counters, and facts for subscribers."""
