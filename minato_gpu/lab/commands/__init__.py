"""The parts that all commands share, and the analysis of a script."""
