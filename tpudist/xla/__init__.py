"""The only access to JAX's compiler and runtime: meshes, devices, topologies, collectives."""
