"""The strategies, one file each: a mesh, a placement rule, and a one-sentence description."""
