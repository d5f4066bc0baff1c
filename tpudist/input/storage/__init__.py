"""Where the bytes of data files are: on a local disk, or in an object store."""
