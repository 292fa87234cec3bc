"""How far each loader's workers scale: ``python -m benchmarks.scaling`` (see ``benchmarks.scaling.__main__``)."""
