"""What happens to samples that fail, and to workers that die or hang."""
