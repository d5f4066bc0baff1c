"""Arguments of a call, and the flat inputs of the program that are made of them."""
