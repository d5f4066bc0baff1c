"""The engine that runs actors as processes of Ray."""
