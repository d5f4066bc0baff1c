"""Around the start of a compiled step: its inputs, agreement of processes, signals, throttle."""
