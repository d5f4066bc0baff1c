"""Ports programs from tf.distribute to tpudist, as far as that is safe, and lists the rest."""

from tpudist.port.leftovers import Leftover
from tpudist.port.notebook import port_notebook, show_code
from tpudist.port.port_program import CannotPort, Ported, port_program

__all__ = ["CannotPort", "Leftover", "Ported", "port_notebook", "port_program", "show_code"]
