"""Exit codes of the processes of a run, from which a supervisor decides whether to restart."""

EXIT_USER_ERROR = 1
"""The program raised, or the processes did different things: a restart would not help."""
EXIT_PEER_LOST = 75
"""Another process or the network failed: restart from a checkpoint. EX_TEMPFAIL of sysexits.h."""
EXIT_PREEMPTED = 143
"""A process that was asked to end has ended: 128 plus the number of SIGTERM."""
