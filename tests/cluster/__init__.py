"""What needs Ray: run by ``make test-cluster``, skipped where Ray is not installed."""
