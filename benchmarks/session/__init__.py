"""The parts of ``benchmarks.gpu_session``: who is measured, how, and what the figures should be."""
