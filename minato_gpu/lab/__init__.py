"""The analysis, the simulation, the demonstration and the commands. Nothing that runs in production imports them."""
