"""All communication: collectives, the ledger, differentiable moves.

A further backend, beside those for gloo, NCCL and dry meshes, is one class and one line: see
``espalier.comm.backend``.
"""

from espalier.comm.backend import Work
from espalier.comm.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from espalier.comm.ledger import Collective, Entry, Ledger, ledger, observed
from espalier.comm.redistribute import move
from espalier.comm.row_exchange import Spans, exchange, spans_of

Pending = Work  # its old name

__all__ = [
    "Collective",
    "Entry",
    "Ledger",
    "Pending",
    "Spans",
    "Work",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "exchange",
    "ledger",
    "move",
    "observed",
    "reduce_scatter",
    "spans_of",
]
