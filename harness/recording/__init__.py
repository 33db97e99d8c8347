"""Layer 1: the real lifecycle of N trainer ranks against M stub engines in one process, with one ordered event log."""
