"""What happens in a run, told once and heard by whoever wants to know (see README.md)."""
