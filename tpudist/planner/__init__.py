"""Plans: memory, time and communication of a step on a TPU slice that you do not have yet."""

from tpudist.planner.abstract_arguments import GlobalBatch
from tpudist.planner.calibration import Calibration, read_calibration
from tpudist.planner.layouts.candidates import Candidate
from tpudist.planner.layouts.layout_search import search
from tpudist.planner.layouts.search_result import SearchResult
from tpudist.planner.plain_step import plan
from tpudist.planner.plan_record import Plan
from tpudist.planner.server_plan import ServerPlan
from tpudist.xla.hardware.slices import parse as parse_topology
from tpudist.xla.topology import devices

__all__ = [
    "Calibration",
    "Candidate",
    "GlobalBatch",
    "Plan",
    "SearchResult",
    "ServerPlan",
    "devices",
    "parse_topology",
    "plan",
    "read_calibration",
    "search",
]
