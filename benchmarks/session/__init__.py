"""The parts of ``benchmarks.gpu_session``: who is measured, and how."""
