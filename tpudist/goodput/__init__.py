"""Records how each process spends its time, and diagnoses where the time of a run went."""
