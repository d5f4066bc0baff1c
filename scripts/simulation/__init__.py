"""Simulates the processes of a run: their real control plane, on virtual time, from a seed.

`python scripts/simulate.py --help`; `docs/how_it_scales.md` says what is real and what is a model.
"""
