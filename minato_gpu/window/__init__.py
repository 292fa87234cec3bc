"""Makes batches of ready samples."""
