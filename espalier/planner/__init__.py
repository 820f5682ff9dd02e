"""Foresight: what a plan will take on a cluster, told before any device is there."""

from espalier.planner.cells import Recorder
from espalier.planner.cluster import Cluster, shipped
from espalier.planner.compose import Totals, composed
from espalier.planner.prediction import Found, Prediction
from espalier.planner.search import Search
from espalier.planner.whole import auto

__all__ = [
    "Cluster",
    "Found",
    "Prediction",
    "Recorder",
    "Search",
    "Totals",
    "auto",
    "composed",
    "shipped",
]
