"""The engine: one plain training loop over any plan, for real or dry."""

from espalier.engine.accumulation import UnseenCountError
from espalier.engine.dry import DryReport, LayoutTable, dry_run, explain_layouts
from espalier.engine.engine import Engine
from espalier.engine.exporting import install as _install_exporting
from espalier.engine.module import EngineModule, prepare
from espalier.engine.norm import SpikeError
from espalier.engine.seen import install as _install_clipping
from espalier.engine.start import initialize
from espalier.faults.settings import Spikes

_install_clipping()
_install_exporting()

__all__ = [
    "DryReport",
    "Engine",
    "EngineModule",
    "LayoutTable",
    "SpikeError",
    "Spikes",
    "UnseenCountError",
    "dry_run",
    "explain_layouts",
    "initialize",
    "prepare",
]
