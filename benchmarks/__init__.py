"""The comparison harness: every loader does the same work, on the same cores, and what it delivers is checked.

``benchmarks/README.md`` lists the commands. Each takes ``--json PATH`` (``-`` for standard output), ``--repetitions``
and ``--quick`` (toy size, whose figures mean nothing).
"""
