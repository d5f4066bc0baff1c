"""Estimates of a step without the compiler: a roofline over its jaxpr under given shardings."""
