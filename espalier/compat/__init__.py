"""The interfaces that people come from, as thin layers: each makes a plan and an engine of what it is told.

A program runs after a change of its imports; what an interface takes and has no use for here is told in its
page of the documentation, and what cannot be done is refused.
"""
