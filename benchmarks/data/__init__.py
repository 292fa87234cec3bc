"""Data sets in the real formats, made from what installed packages ship, with the published spread of cost."""
