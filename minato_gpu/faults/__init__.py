"""What becomes of samples that fail, and of workers that die or hang."""
