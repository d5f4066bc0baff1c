"""Says what a step costs on a TPU slice that nobody has rented; see `Strategy.plan`."""

from tpudist.planner.abstract import GlobalBatch
from tpudist.planner.candidates import Candidate
from tpudist.planner.plan import Plan
from tpudist.planner.search_result import SearchResult
from tpudist.planner.searching import search
from tpudist.xla.slices import parse as parse_topology
from tpudist.xla.topology import devices

__all__ = [
    "Candidate",
    "GlobalBatch",
    "Plan",
    "SearchResult",
    "devices",
    "parse_topology",
    "search",
]
