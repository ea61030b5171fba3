"""Cost before anything runs: work by rank and step, bytes by link, memory and seconds."""

from .attention_clock import AttentionClock, Load, load_of_density, load_of_recording
from .clock import CallSizes, Prediction, RingShape, predict, step_seconds
from .memory import Memory, memory_of
from .model import PRESETS, ModelShape
from .model_source import model_of, model_of_flags
from .plan import Plan, check_plan
from .profile import PROFILES, Profile, load_profile
from .step_time import StepTime, step_time

__all__ = [
    "PRESETS",
    "PROFILES",
    "AttentionClock",
    "CallSizes",
    "Load",
    "Memory",
    "ModelShape",
    "Plan",
    "Prediction",
    "Profile",
    "RingShape",
    "StepTime",
    "check_plan",
    "load_of_density",
    "load_of_recording",
    "load_profile",
    "memory_of",
    "model_of",
    "model_of_flags",
    "predict",
    "step_seconds",
    "step_time",
]
