"""The one door to the network: collectives (real and dry), the ledger, differentiable moves."""

from espalier.comm.collectives import Pending, all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from espalier.comm.ledger import Collective, Entry, Ledger, ledger, observed
from espalier.comm.moves import move
from espalier.comm.spans import Spans, exchange, pieces
from espalier.comm.watch import watched

__all__ = [
    "Collective",
    "Entry",
    "Ledger",
    "Pending",
    "Spans",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "exchange",
    "ledger",
    "move",
    "observed",
    "pieces",
    "reduce_scatter",
    "watched",
]
