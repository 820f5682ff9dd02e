"""The one door to the network: collectives (real and dry), the ledger, differentiable moves."""

from espalier.comm.collectives import Pending, all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from espalier.comm.ledger import Entry, Ledger, ledger
from espalier.comm.moves import move

__all__ = [
    "Entry",
    "Ledger",
    "Pending",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "ledger",
    "move",
    "reduce_scatter",
]
