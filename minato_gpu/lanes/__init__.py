"""The places where work happens: CPU workers (processes or threads) and device executors."""
