"""One file per strategy: a mesh, a placement rule, one sentence on top. None imports another."""
