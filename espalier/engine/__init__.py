"""The engine: one plain training loop over any plan, for real or dry."""

from espalier.engine.accumulation import UnseenCountError
from espalier.engine.dry import DryReport, dry_run
from espalier.engine.engine import Engine
from espalier.engine.layouts import LayoutTable, explain_layouts
from espalier.engine.spikes import SpikeError, Spikes
from espalier.engine.start import initialize

__all__ = [
    "DryReport",
    "Engine",
    "LayoutTable",
    "SpikeError",
    "Spikes",
    "UnseenCountError",
    "dry_run",
    "explain_layouts",
    "initialize",
]
