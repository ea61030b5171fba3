"""What it will cost: work by rank and step, bytes by link, memory and seconds, before anything runs."""

from .attention_clock import AttentionClock, Load, load_of_density, load_of_recording
from .caps import density_of_caps, drawn_index, max_slash_for
from .memory import Memory, memory_of
from .model_shape import ModelShape
from .model_source import model_of, model_of_flags
from .owner_pairs import OwnerPairs, Owners, owner_pairs, rank_pairs
from .plan import Plan, check_plan
from .presets import PRESETS
from .profile import Profile
from .profiles import PROFILES, load_profile
from .step_time import StepTime, step_time
from .timeline import Prediction, predict
from .tour import RingTour
from .traffic import CallSizes, Links, Messages

__all__ = [
    "PRESETS",
    "PROFILES",
    "AttentionClock",
    "CallSizes",
    "Links",
    "Load",
    "Memory",
    "Messages",
    "ModelShape",
    "OwnerPairs",
    "Owners",
    "Plan",
    "Prediction",
    "Profile",
    "RingTour",
    "StepTime",
    "check_plan",
    "density_of_caps",
    "drawn_index",
    "load_of_density",
    "load_of_recording",
    "load_profile",
    "max_slash_for",
    "memory_of",
    "model_of",
    "model_of_flags",
    "owner_pairs",
    "predict",
    "rank_pairs",
    "step_time",
]
