"""Policies that decide what a cache keeps, and what they know of the future. No clock, thread, file or socket."""
