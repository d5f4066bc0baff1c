"""The table of replicas and their devices that a notebook shows for a strategy."""

from tpudist.context.strategy_base import StrategyBase
from tpudist.display.text_tables import TextTable

# About as many rows, and devices in a row, as fit on one screen.
_MAX_REPLICAS, _MAX_DEVICES = 16, 8


def write_html(strategy: StrategyBase) -> str:
    """Returns an HTML table with one row for each replica."""
    mesh = strategy.replica_mesh
    inner = ", ".join(f"{name}={mesh.mesh.shape[name]}" for name in mesh.inner_axes)
    rows = []
    for i in range(min(mesh.num_replicas, _MAX_REPLICAS)):
        devices = mesh.devices_of(i)
        shown = ", ".join(f"{d.platform}:{d.id}" for d in devices[:_MAX_DEVICES])
        processes = sorted({d.process_index for d in devices})
        num_hidden = len(devices) - _MAX_DEVICES
        more = f" and {num_hidden} more" if num_hidden > 0 else ""
        rows.append((str(i), shown + more, ", ".join(map(str, processes))))
    notes = [f"axes inside a replica: {inner or 'none, a replica is one device'}"]
    if mesh.axis_name is not None:
        notes.append(f"the axis of replicas is called 'replica' and {mesh.axis_name!r}")
    if mesh.num_replicas > len(rows):
        notes.insert(0, f"and {mesh.num_replicas - len(rows)} replicas more")
    head = ("replica", "devices", "process")
    return TextTable(head, rows, repr(strategy), notes)._repr_html_()
