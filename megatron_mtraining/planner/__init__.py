"""WHAT it will cost: work by rank and step, bytes by link and seconds, before anything runs."""

from .owner_pairs import OwnerPairs, Owners, owner_pairs, rank_pairs
from .profile import PROFILES, Profile
from .timeline import Prediction, predict
from .tour import RingTour
from .traffic import CallSizes, Links, Messages

__all__ = [
    "PROFILES",
    "CallSizes",
    "Links",
    "Messages",
    "OwnerPairs",
    "Owners",
    "Prediction",
    "Profile",
    "RingTour",
    "owner_pairs",
    "predict",
    "rank_pairs",
]
