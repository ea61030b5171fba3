"""Every number that the planner counts with, written out again: bytes of a GPU, and seconds of each part of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_mtraining.planner.attention_clock import AttentionClock, load_of_density
from megatron_mtraining.planner.memory import LayerActivations, attention_bytes, stage_memory, working_sets
from megatron_mtraining.planner.model import PRESETS
from megatron_mtraining.planner.plan import Plan
from megatron_mtraining.planner.profile import PROFILES
from megatron_mtraining.planner.step_time import step_time

QWEN, H200 = PRESETS["qwen2.5-3b"], PROFILES["h200"]
LAYERS, HIDDEN, FFN, VOCAB = 36, 2048, 11008, 151936
PLAN = Plan(seq_len=65536, tp=2, cp=2, pp=2, dp=2, node_size=4, global_batch=16, pack_width=1152)
TOKENS = 32768
"""Of a rank."""

BATCHES = 8
"""Micro-batches of a step."""

MEMORY, PRODUCTS, LINK = 1e9 * H200.memory_gb_s, 1e12 * H200.gemm_tflops, 1e9 * H200.inner_gb_s


def test_stages_hold_the_microbatches_that_are_in_flight():
    """Of a pipeline of two, two in the first stage and one in the last."""
    saved = LAYERS // 2 * LayerActivations.of(QWEN, PLAN).saved("none")
    assert [stage_memory(QWEN, PLAN, stage).saved for stage in (0, 1)] == [2 * saved, saved]


def test_tables_are_of_a_ranks_angles_and_the_whole_batch():
    """Float32 angles; tokens, labels and positions of 8 bytes, and a mask of 4."""
    assert stage_memory(QWEN, PLAN, 0).tables == 4 * TOKENS * 128 + (8 + 8 + 8 + 4) * 65536


@pytest.mark.parametrize(
    ("plan", "communicators"),
    [
        (Plan(seq_len=65536), 0),
        (Plan(seq_len=65536, cp=8), 1 + 1 + 1 + 2),
        (Plan(seq_len=65536, cp=8, node_size=4), 1 + 1 + 1 + 2 + 2),
        (PLAN, 1 + 1 + 1 + 1 + 1 + 2),
    ],
)
def test_communicators(plan, communicators):
    """The world, tensor, pipeline, data with context, context; keys and gradients inside a node and between nodes."""
    assert stage_memory(QWEN, plan, 0).framework == round(0.75 * 2**30) + communicators * 128 * 2**20


def test_what_is_offloaded_lies_on_the_host():
    """The states of 12 bytes, and float32 gradients, of a share of the parameters."""
    parameters = QWEN.stage_parameters(tp=2, pp=2, stage=0)
    memory = stage_memory(QWEN, replace(PLAN, offload=True), 0)
    assert (memory.optimizer, memory.host_optimizer) == (0, 12 * parameters // 4 + 4 * parameters // 4)
    assert stage_memory(QWEN, PLAN, 0).host_optimizer == 0


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gathered_tensors_of_a_backward(tp):
    """Under sequence parallelism a layer's input and the gradient of its output, of all tensor-parallel ranks' tokens.

    The backward of attention and of an MLP hold both, of ``tp`` times a rank's part each; the loss its input only.
    """
    plan = replace(PLAN, tp=tp, node_size=8)
    layer, workspace = LayerActivations.of(QWEN, plan), 64 << 20
    gathered = 2 * TOKENS * HIDDEN if tp > 1 else 0
    sets = working_sets(QWEN, plan, has_loss=True)
    part, query, key = 2 * TOKENS * HIDDEN // tp, 2 * TOKENS * 2048 // tp, 2 * TOKENS * max(256 // tp, 128)
    attention = -layer.mlp + 2 * part + 2 * gathered + 2 * (query + key) + attention_bytes(layer, plan)
    assert sets["backward of attention"] == attention + workspace
    ffn_input = 2 * TOKENS * 2 * FFN // tp
    assert sets["backward of an MLP"] == part + ffn_input + 2 * gathered + 2 * HIDDEN * 2 * FFN // tp + workspace
    logits = 6 * TOKENS * QWEN.padded_vocab(tp) // tp + 2 * part + gathered
    assert sets["the logits"] == logits + workspace


def seconds(**changes):
    """The step of 8 micro-batches of 65536 tokens on two context-parallel ranks."""
    clock = AttentionClock(model=QWEN, load=load_of_density(65536, 0.1), profile=H200)
    plan = replace(PLAN, tp=1, pp=1, dp=1, global_batch=BATCHES)
    return step_time(QWEN, replace(plan, **changes), clock)


def test_products_and_bytes_of_a_step():
    """A layer's backward is twice its forward; each logit, and each gradient that is summed, is moved so often."""
    parameters = QWEN.stage_parameters()
    layers = LAYERS * 3 * 2 * QWEN.layer_weights * TOKENS
    moved = LAYERS * 3 * 2 * (10 * HIDDEN + 3 * FFN + 4 * 16 * 128 + 2 * 2 * 128) * TOKENS
    time = seconds()
    assert time.products == pytest.approx(BATCHES * (layers + 6 * TOKENS * VOCAB * HIDDEN) / PRODUCTS)
    assert time.elementwise == pytest.approx(BATCHES * (moved + 52 * TOKENS * VOCAB + 12 * parameters) / MEMORY)


def test_optimizer_of_a_step():
    """Zeroed and read for the norm; then a gradient, three states read and written, and a weight, of a share."""
    parameters = QWEN.stage_parameters()
    assert seconds().optimizer == pytest.approx((8 + (4 + 24 + 2) / 2) * parameters / MEMORY)
    on_the_host = 6 / (1e9 * H200.host_gb_s) + 1 / (1e9 * H200.host_adam_gparams_s)
    assert seconds(offload=True).optimizer == pytest.approx(8 * parameters / MEMORY + parameters / 2 * on_the_host)


def test_what_travels_in_a_step():
    """Gathers of hidden states over tensor-parallel ranks; gradients and parameters over all ranks that share them."""
    exchange = 2 * TOKENS * HIDDEN / 2 / LINK + 1e-6 * H200.inner_latency_us
    assert seconds(tp=2).tensor_parallel == pytest.approx(BATCHES * LAYERS * (4 + 6) * exchange)
    assert seconds(tp=2, recompute="selective").tensor_parallel == pytest.approx(BATCHES * LAYERS * 12 * exchange)
    assert seconds().tensor_parallel == 0
    parameters = QWEN.stage_parameters()
    assert seconds(overlap=False).data_parallel == pytest.approx((4 + 2) * parameters / 2 / LINK)
    assert seconds().data_parallel == 0


def test_a_pipeline_fills_and_empties():
    """One micro-batch of a stage for each further stage, and hidden states sent both ways."""
    time = seconds(pp=2)
    passes = sum(time.parts().values()) - time.pipeline - time.data_parallel - time.optimizer
    sending = 2 * 2 * TOKENS * HIDDEN / LINK
    assert time.pipeline == pytest.approx(passes / BATCHES + (BATCHES + 1) * sending)
