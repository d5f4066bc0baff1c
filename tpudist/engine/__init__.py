"""What runs the parts of an asynchronous run: actors that are called, watched and replaced."""
