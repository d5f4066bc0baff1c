"""One function given to `Strategy.run`, from call to result."""
