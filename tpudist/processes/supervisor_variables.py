"""Environment variables that a supervisor sets for its processes."""

SUPERVISOR_VARIABLE = "TPUDIST_SUPERVISOR"
"""Environment variable `host port secret index`, which a supervisor sets for its processes."""
COMPILE_CACHE_VARIABLE = "TPUDIST_COMPILE_CACHE"
"""Environment variable: folder where processes of a host keep compiled programs for later ones."""
FOLDER_VARIABLE = "TPUDIST_FOLDER"
"""Environment variable: working directory in which the supervisor started the program."""
