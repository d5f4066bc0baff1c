"""The straight path of calls that look like the last one: see `steady_call`."""
