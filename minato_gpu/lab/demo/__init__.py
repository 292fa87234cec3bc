"""The demonstration: a data set of real photographs, a small model, and the loader between them."""
