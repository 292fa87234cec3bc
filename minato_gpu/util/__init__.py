"""Small helpers that every room may use."""
