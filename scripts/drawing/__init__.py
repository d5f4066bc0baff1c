"""The pictures of the documentation: `scripts/pictures.py` writes them."""
