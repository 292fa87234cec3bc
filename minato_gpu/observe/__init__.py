"""What happens in a run: counters, and facts for subscribers."""
