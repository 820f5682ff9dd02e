"""What goes wrong with checkpoints."""

from espalier.checkpoint.pickles import FormatError


class CheckpointError(FormatError):
    """A checkpoint could not be written, read or found; the message says why and what to do."""
