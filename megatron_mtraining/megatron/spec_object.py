"""``--spec megatron_mtraining.megatron.spec_object gpt``: as :mod:`.spec`, where ``--spec`` takes no function.

Core 0.16 to 0.18 ask for an object, and import it when they build the model. So importing this module is what builds
the spec, from Megatron's flags, and what makes the ring's groups: a collective, on every rank.
"""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state

from ..errors import invalid
from . import spec
from .compat import require_symbol


def _from_flags() -> Any:
    if not parallel_state.model_parallel_is_initialized():
        raise RuntimeError(
            "--spec must be megatron_mtraining.megatron.spec gpt in this Megatron, got spec_object. "
            "It imports the spec before there are groups."
        )
    args = require_symbol("megatron.training", "get_args")()
    if args.virtual_pipeline_model_parallel_size:
        value = args.virtual_pipeline_model_parallel_size
        raise invalid(
            "--virtual-pipeline-model-parallel-size", "absent with a spec object", value, "One object has one stage."
        )
    return spec.gpt(require_symbol("megatron.training.arguments", "core_transformer_config_from_args")(args))


gpt = _from_flags()
