"""Epochs through one set of lanes: the consumer's side, the event loop, and the supervision of workers."""
