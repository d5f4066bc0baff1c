"""Processes of a run: started on this host, watched, started again, ended; and explained."""
