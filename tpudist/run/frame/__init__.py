"""What one trace knows while the function runs: values of Variables, captures, rows."""
