"""Where the time of a run went: phases of each process, the history of a run, its diagnosis."""
