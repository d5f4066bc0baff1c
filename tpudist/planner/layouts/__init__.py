"""The search for layouts of a step: its candidates, its order and its result."""
