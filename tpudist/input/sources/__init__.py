"""Sources of batches: datasets in memory, in files, of iterables and of other libraries."""
