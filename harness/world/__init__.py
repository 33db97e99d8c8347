"""Layer 3: real worlds. torchrun ranks with Megatron-core, receivers with vLLM in-process, deadlines and hang reports.

Who is who, from the outside in:

    controller   the pytest process, or torchrun's first process: owns a `World`, asks for scenarios (world.py, hub.py)
    host         imports torch, Megatron and vLLM once, then forks worlds on command (host.py)
    launcher     torchrun's own agent, one forked process per world (launcher.py)
    supervisor   what torchrun believes to be the rank; outlives it (supervisor.py)
    rank         the supervisor's forked child: a trainer rank or a receiver (rank.py, trainer.py, receiver.py)

A rank that is killed, stopped or hangs is reported by its supervisor, so torchrun never tears the world down before the
evidence has been collected.
"""
