"""Predicted costs for the engine: the cost model, fed with what lanes measure."""
