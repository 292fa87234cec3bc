"""The production scheduler under a virtual clock: named scenarios, lower bounds of the time, the peers' policies."""
