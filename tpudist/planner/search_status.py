"""What may become of a candidate of a search."""

FITS, TOO_LARGE, FAILED, NOT_REACHED = "fits", "too large", "failed", "not reached"
