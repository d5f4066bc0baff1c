"""The parts of the transformer, such as attention, experts, positions and rematerialization."""
