"""Doctor of a machine, or of a model with its flags and data: ``python -m megatron_mtraining doctor``.

``machine`` describes what is installed. ``examination`` runs a training script up to the place where training would
begin, several times with other flags, and compares. docs/doctor.md describes both.
"""


class CannotStartError(ValueError):
    """Error for an examination that cannot begin here or under these flags; the message has the remedy."""
