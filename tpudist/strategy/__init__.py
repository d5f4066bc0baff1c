"""The class `Strategy`, which all strategies share: a mesh and a placement rule."""
