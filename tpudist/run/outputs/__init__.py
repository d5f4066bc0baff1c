"""Results of a call, and the state that it gives back."""
