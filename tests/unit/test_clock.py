"""Bytes and times of a ring call: worked by hand where that is possible, bounded where it is not."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from megatron_mtraining.config import SCHEDULES
from megatron_mtraining.metrics import RingWork
from megatron_mtraining.planner.clock import CallSizes, RingClock, predict
from megatron_mtraining.planner.profile import PROFILES, Profile, load_profile
from megatron_mtraining.ring import RingShape

PROFILE = Profile(
    slash_forward_tflops=100,
    vertical_forward_tflops=50,
    slash_backward_tflops=80,
    vertical_backward_tflops=40,
    dense_forward_tflops=200,
    dense_backward_tflops=160,
    gpu_forward_step_us=0,
    gpu_backward_step_us=0,
    host_forward_us=0,
    host_forward_step_us=0,
    host_backward_us=0,
    host_backward_step_us=0,
    inner_gb_s=100,
    outer_gb_s=10,
    inner_latency_us=5,
    outer_latency_us=50,
    memory_gib=40,
    gemm_tflops=300,
    memory_gb_s=1000,
    selection_gpairs_s=100,
    host_gb_s=10,
    host_adam_gparams_s=1,
    gpu="cpu",
    ranks=0,
    nodes=0,
    source="a test",
)
SIZES = CallSizes(seq_len=4608, num_heads=8, num_kv_heads=2, head_dim=64)


def ring(kind, cp_size, node_size):
    return RingShape(kind=kind, cp_size=cp_size, node_size=node_size)


def even_work(shape, pairs=10**9, vertical=0):
    return RingWork(torch.full((shape.cp_size, shape.num_steps), pairs), torch.full((shape.cp_size,), vertical))


def predicted(shape, work, *, profile=PROFILE, pack_width=0, **options):
    return predict(work, shape, SIZES, profile, pack_width=pack_width, **options)


ROW = torch.zeros(1, dtype=torch.bfloat16)


def started(kind, cp_size, node_size, now):
    """A clock whose ranks stand at ``now``, and its groups."""
    clock = RingClock(ring(kind, cp_size, node_size), PROFILE, query_share=0.0)
    clock.start(torch.zeros(cp_size, 0).double())
    clock.now = now.double()
    return clock, clock.groups(SIZES, pack_width=100)


def keys_of(shape):
    """Bytes of a rank's keys and values in 16 bits."""
    return 2 * (4608 // shape.cp_size) * 2 * 64 * 2


@pytest.mark.parametrize(("num_lists", "lists"), [(None, 8), (2, 2)])
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_messages(num_lists, lists, dtype, size):
    """Keys and vertical rows in the dtype, their gradients in float32; a sum over 4 ranks of a node sends 3/2 of it."""
    shape = ring("flat", 4, 4)
    sizes = replace(SIZES, num_lists=num_lists, dtype=dtype)
    both = predict(even_work(shape), shape, sizes, PROFILE, pack_width=100)
    keys, packs = 2 * 1152 * 2 * 64, 2 * 100 * lists * 64
    assert both.forward.inner_bytes == 3 * keys * size + 3 / 2 * packs * size
    assert both.backward.inner_bytes == 3 * keys * (size + 4) + 3 / 2 * packs * 4


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_rank_computes_and_sends_nothing(schedule):
    shape = ring(schedule, 1, 8)
    both = predicted(shape, even_work(shape, vertical=10**8))
    flops = 10**9 * 4 * 64 / 100e12 + 10**8 * 4 * 64 / 50e12
    assert both.forward.ms == pytest.approx(1e3 * flops)
    assert both.backward.ms == pytest.approx(1e3 * (10**9 * 640 / 80e12 + 10**8 * 640 / 40e12))
    assert both.forward.inner_bytes == both.backward.outer_bytes == 0
    assert both.forward.exposed_ms == pytest.approx(0)


def test_dense_work_takes_the_dense_rate():
    shape = ring("flat", 1, 1)
    both = predicted(shape, even_work(shape), is_dense=True)
    assert both.forward.ms == pytest.approx(1e3 * 10**9 * 4 * 64 / 200e12)


def test_without_work_a_flat_ring_takes_its_hops():
    shape = ring("flat", 4, 4)
    both = predicted(shape, even_work(shape, pairs=0))
    hop = 5e-6 + keys_of(shape) / 100e9
    gradient_hop = 5e-6 + 2 * keys_of(shape) / 100e9
    assert both.forward.ms == pytest.approx(1e3 * 3 * hop)
    # Keys and gradients share the link: the first gradients leave after the first hop of keys, then both in turn.
    assert both.backward.ms == pytest.approx(1e3 * (3 * hop + 3 * gradient_hop))
    assert both.forward.inner_bytes == 3 * keys_of(shape)
    assert both.backward.inner_bytes == 9 * keys_of(shape)


def test_long_steps_hide_every_transfer_of_keys():
    shape = ring("hierarchical", 8, 4)
    work = even_work(shape, pairs=10**11)
    forward = predicted(shape, work).forward
    assert forward.ms == pytest.approx(forward.compute_ms)
    assert forward.exposed_ms == pytest.approx(0)


def test_the_last_gradients_travel_under_the_queries_of_the_last_step():
    """In a flat ring all of them; of two levels the last hop inside a node is waited for, that between nodes is not."""
    flat, two_levels = ring("flat", 4, 4), ring("hierarchical", 8, 4)
    exposed = [predicted(shape, even_work(shape, pairs=10**11)).backward.exposed_ms for shape in (flat, two_levels)]
    hop = 1e3 * (5e-6 + 2 * keys_of(two_levels) / 100e9)
    assert exposed == pytest.approx([0, hop], abs=1e-6)


def test_the_outer_transfer_has_a_round_of_time():
    """Nodes of 4: a hop between nodes as long as four steps is hidden; in a flat ring it holds up every step."""
    step = 10**9 * 4 * 64 / 100e12
    sizes_bytes = keys_of(ring("flat", 8, 4))
    slow = replace(PROFILE, outer_gb_s=1e-9 * sizes_bytes / (3.9 * step), outer_latency_us=0)
    two_levels, flat = ring("hierarchical", 8, 4), ring("flat", 8, 4)
    assert predicted(two_levels, even_work(two_levels), profile=slow).forward.exposed_ms == pytest.approx(0)
    assert predicted(flat, even_work(flat), profile=slow).forward.ms > 1e3 * (7 * 3.9 * step)


@pytest.mark.parametrize(("cp_size", "node_size"), [(4, 4), (8, 4), (6, 3), (9, 3), (6, 1)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bytes_are_those_of_the_transfers(schedule, cp_size, node_size):
    """As tests/ring/test_collectives.py counts them on the ring itself."""
    shape = ring(schedule, cp_size, node_size)
    nodes, keys = cp_size // node_size, keys_of(shape)
    both = predicted(shape, even_work(shape))
    if schedule == "flat":
        inner, outer = ((cp_size - 1) * (node_size > 1), (cp_size - 1) * (nodes > 1))
    else:
        inner, outer = nodes * (node_size - 1), nodes - 1
    assert (both.forward.inner_bytes, both.forward.outer_bytes) == (inner * keys, outer * keys)
    assert (both.backward.inner_bytes, both.backward.outer_bytes) == (3 * inner * keys, 3 * outer * keys)


def test_gathered_verticals_are_reduced_over_both_levels():
    clock, transports = started("hierarchical", 8, 4, torch.arange(8) * 1e-3)
    num_bytes = transports.cp.elements * 2
    done = transports.cp.post_all_reduce(ROW).done
    inner, outer = 2 * num_bytes * 3 / 4, 2 * num_bytes / 4 * 1 / 2
    expected = 7e-3 + 2 * 5e-6 + inner / 100e9 + 2 * 50e-6 + outer / 10e9
    assert done.tolist() == pytest.approx([expected] * 8)
    assert clock.sent.tolist() == [[inner] * 8, [outer] * 8]


def test_a_transfer_waits_for_both_ends_and_for_its_link():
    clock, transports = started("flat", 3, 3, torch.tensor([0.0, 1.0, 0.0]))
    first = transports.inner.exchange(ROW).done
    one = 5e-6 + 2 * transports.inner.elements / 100e9
    # 0 to 1 and 1 to 2 start when rank 1 comes; only 2 to 0 starts at once, and rank 0 still sends.
    assert first.tolist() == pytest.approx([1 + one, 1 + one, 1 + one])
    clock.now = torch.zeros(3).double()
    second = transports.inner.exchange(ROW).done
    assert second.tolist() == pytest.approx([1 + 2 * one] * 3)


def test_collectives_take_turns_on_a_link():
    """A node's keys and its values are gathered one after the other; neither another node nor gradients wait for it."""
    clock, transports = started("gather", 4, 2, torch.tensor([0.0, 0.0, 1.0, 2.0]))
    latency, sending = 5e-6, 2 * transports.inner.elements / 100e9
    first, second = (transports.inner.post_all_gather(ROW).done for _ in range(2))
    rows = torch.zeros(2, 1, dtype=torch.bfloat16)
    gradients = transports.inner_gradient.post_reduce_scatter(rows).done
    for done, messages in ((first, 1), (second, 2), (gradients, 1)):
        one = latency + messages * sending
        assert done.tolist() == pytest.approx([one, one, 2 + one, 2 + one], rel=1e-12)
    assert clock.sent[0].tolist() == [3 * 2 * transports.inner.elements] * 4


@pytest.mark.parametrize(("schedule", "steps"), [("hierarchical", 32), ("flat", 32), ("gather", 4)])
def test_launches_count_where_they_take_longer(schedule, steps):
    """A host launches a gathered node's step once; who is slower rules each direction by itself."""
    shape = ring(schedule, 32, 8)
    hosts = {"host_forward_us": 100, "host_forward_step_us": 10, "host_backward_us": 50, "host_backward_step_us": 1e6}
    both = predicted(shape, even_work(shape), profile=replace(PROFILE, **hosts))
    forward, backward = both.forward, both.backward
    assert (forward.host_ms, backward.host_ms) == pytest.approx((0.1 + 0.01 * steps, 0.05 + 1e3 * steps))
    assert forward.host_ms < forward.gpu_ms == forward.ms
    assert backward.gpu_ms < backward.host_ms == backward.ms
    dense = predicted(shape, even_work(shape), profile=replace(PROFILE, **hosts), is_dense=True)
    assert dense.backward.host_ms == 0 < dense.backward.ms


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_uneven_work_costs_between_the_busiest_rank_and_lockstep(schedule):
    shape = ring(schedule, 8, 4)
    pairs = torch.randint(0, 10**9, (8, shape.num_steps))
    free_links = replace(PROFILE, inner_gb_s=1e9, outer_gb_s=1e9, inner_latency_us=0, outer_latency_us=0)
    for direction, rate in (("forward", 4 * 64 / 100e12), ("backward", 10 * 64 / 80e12)):
        ms = getattr(predicted(shape, RingWork(pairs, torch.zeros(8).long()), profile=free_links), direction).ms
        seconds = pairs.double() * rate
        assert 1e3 * seconds.sum(1).max() * 0.999 <= ms <= 1e3 * seconds.max(0).values.sum() * 1.001


def test_a_profile_survives_its_file(tmp_path):
    (tmp_path / "profile.json").write_text(json.dumps(asdict(PROFILE)))
    assert load_profile(str(tmp_path / "profile.json")) == PROFILE
    assert load_profile("h200") == PROFILES["h200"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            json.dumps(asdict(PROFILE) | {"inner_gb_s": 0}),
            r"inner_gb_s of the profile must be a number above 0, got 0\.",
        ),
        (json.dumps(asdict(PROFILE) | {"host_forward_us": -1}), r"host_forward_us of .* a number from 0, got -1\."),
        (json.dumps(asdict(PROFILE) | {"outer_gb_s": "fast"}), r"outer_gb_s of .* a number above 0, got 'fast'\."),
        (json.dumps(asdict(PROFILE) | {"outer_gb_s": float("nan")}), r"outer_gb_s of .* a number above 0, got nan\."),
        (json.dumps({"speed": 3}), r"Missing or unknown: .*host_forward_us, .*speed.* Known by name: h200"),
        ("[1]", r"profile must be a JSON file with a mapping"),
        ("{", r"profile must be a readable JSON file"),
    ],
)
def test_bad_profiles_are_one_sentence(tmp_path, content, sentence):
    (tmp_path / "profile.json").write_text(content)
    with pytest.raises(ValueError, match=sentence):
        load_profile(str(tmp_path / "profile.json"))
