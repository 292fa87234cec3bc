"""Handling of samples that fail, and of workers that hang."""
