"""Pipelines: their stages, their run on the CPU, and fields that depend on no draw."""
