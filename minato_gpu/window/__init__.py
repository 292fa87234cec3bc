"""From ready samples to batches."""
