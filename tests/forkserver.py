"""The one fork server of a test process, which imports once what the ranks of all tests start with.

multiprocessing keeps a single server, and it imports what was asked for before its first process and nothing later.
Were each folder to ask for its own modules, the first would win, and every rank of the others would import Megatron
anew: five seconds of a core for each of four ranks.
"""

from __future__ import annotations

import functools
import multiprocessing
from multiprocessing.forkserver import ensure_running
from typing import Any

import torch

RINGS = (
    "torch.distributed",
    "megatron_mtraining.transport.process_group",
    "tests.ring.test_processes",
    "tests.ring.test_selection_agreement",
    "tools.bench.paper.rank",
)
MEGATRON = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron_mtraining.megatron",
    "tests.megatron.tiny_gpt",
)
"""Left out where there are GPUs: what TransformerEngine does with one while it is imported no fork can use."""

FROZEN = "tests.frozen"
"""The last, so that all others are frozen."""


def preloaded() -> list[str]:
    """The modules that the server imports."""
    return [*RINGS, *(() if torch.cuda.is_available() else MEGATRON), FROZEN]


@functools.cache
def fork_server() -> Any:
    """The multiprocessing context of the server, which is started here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloaded())
    ensure_running()
    return context
