"""Exit codes of processes, by which a supervisor decides whether to restart, and its own."""

EXIT_USER_ERROR = 1
"""The program raised, or the processes did different things: a restart would not help."""
EXIT_GAVE_UP = 70
"""A supervisor has no restart left. EX_SOFTWARE of sysexits.h."""
EXIT_PEER_LOST = 75
"""Another process or the network failed: restart from a checkpoint. EX_TEMPFAIL of sysexits.h."""
EXIT_INTERRUPTED = 130
"""Ctrl-C ended a supervisor: 128 plus the number of SIGINT."""
EXIT_PREEMPTED = 143
"""A process that was asked to end has ended: 128 plus the number of SIGTERM."""
