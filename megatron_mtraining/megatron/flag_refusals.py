"""Flags of Megatron-LM that do not go together with this attention, refused once its arguments are validated."""

from __future__ import annotations

from argparse import Namespace

from ..config import MTrainingConfig
from ..errors import invalid


def check_arguments(args: Namespace, config: MTrainingConfig) -> None:
    """Refuses what would train without this attention, or on a wrong mask, before any group or model is made.

    Args:
        args: Megatron's arguments, validated.
        config: the configuration of this attention.

    Raises:
        ValueError: naming the flag and what to do.
    """
    if getattr(args, "use_legacy_models", False):
        raise invalid("--use-legacy-models", "absent", "it", "Legacy models have no layer specs; use the core ones.")
