"""The state of one trace while the function runs: values of Variables, captures, rows."""
