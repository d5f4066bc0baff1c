"""Builds one program for all replicas from the jaxpr of one replica; see README.md here."""
