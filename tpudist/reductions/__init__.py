"""Many values become one."""
