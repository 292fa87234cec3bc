"""The commands that take more than a few lines, one to a file."""
