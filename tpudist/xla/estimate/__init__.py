"""What a compiled program takes: time, memory and traffic."""
