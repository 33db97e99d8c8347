"""Speed, measured: against what the machine can do at all, and against what a user would pick instead. See README.md."""
