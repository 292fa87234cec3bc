"""One process that drives several devices, all of them fake."""
