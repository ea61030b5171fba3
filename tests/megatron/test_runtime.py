"""One initialisation per process: groups, layout, dense phases and recording."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_mtraining.transport.groups import Placement

from . import tiny_gpt
from .ranks import run_on_ranks


def groups_seen(hierarchical: list[int] | None, inner_size: int | None, hosts: str) -> dict[str, Any]:
    """The ring groups that initialize() made for this rank of a job with CP 4, and what it warned of."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_mtraining import megatron as mtraining

    parallel_state.initialize_model_parallel(context_parallel_size=4, hierarchical_context_parallel_sizes=hierarchical)
    host = mock.patch("socket.gethostname", return_value=hosts[dist.get_rank()])
    with host, mock.patch.object(mtraining.runtime._LOG, "warning") as warning:
        runtime = mtraining.initialize(tiny_gpt.SPARSE, inner_size=inner_size)
    again = mtraining.initialize(tiny_gpt.SPARSE)
    groups = runtime.ring_groups
    seen = {name: dist.get_process_group_ranks(getattr(groups, name)) for name in ("inner", "outer")}
    gradient = {name: dist.get_process_group_ranks(getattr(groups, f"{name}_gradient")) for name in ("inner", "outer")}
    mtraining.destroy()
    parallel_state.destroy_model_parallel()
    warned = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    return seen | {"same": again is runtime, "gradient": gradient, "warned": warned}


@pytest.mark.parametrize(
    ("hierarchical", "inner_size", "hosts", "inner_of_last", "outer_of_last"),
    [
        ([2, 2], None, "abbb", [2, 3], [1, 3]),
        (None, 2, "aabb", [2, 3], [1, 3]),
        (None, None, "aaaa", [0, 1, 2, 3], [3]),
        (None, 1, "aabb", [3], [0, 1, 2, 3]),
    ],
    ids=["megatrons", "given", "one-host", "flat"],
)
def test_levels_of_the_ring(
    hierarchical: list[int] | None,
    inner_size: int | None,
    hosts: str,
    inner_of_last: list[int],
    outer_of_last: list[int],
):
    """Where the first of two hosts has one rank, no inner ring of more stays on its host, and one rank says so."""
    first, *_, seen = run_on_ranks(groups_seen, 4, hierarchical=hierarchical, inner_size=inner_size, hosts=hosts)
    assert [sentence[:63] for sentence in first["warned"]] == (
        ["Inner rings of 2 ranks go from host to host, and every step wai"] if hosts == "abbb" else []
    )
    assert seen["warned"] == []
    assert seen["inner"] == inner_of_last
    assert seen["outer"] == outer_of_last
    assert seen["gradient"] == {"inner": seen["inner"], "outer": seen["outer"]}
    assert seen["same"]


def warnings_of_one_rank() -> int:
    """What initialize() warns of where an inner ring has more ranks than there are."""
    from megatron.core import parallel_state

    from megatron_mtraining import megatron as mtraining

    parallel_state.initialize_model_parallel(context_parallel_size=1)
    with mock.patch.object(mtraining.runtime._LOG, "warning") as warning:
        mtraining.initialize(tiny_gpt.SPARSE, inner_size=8)
    mtraining.destroy()
    parallel_state.destroy_model_parallel()
    return warning.call_count


def test_one_rank_has_no_ring_to_warn_of():
    assert run_on_ranks(warnings_of_one_rank, 1) == [0]


def refusal_of_other_arguments() -> str:
    """What initialize() says when every rank asks for another size of the inner ring."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_mtraining import megatron as mtraining
    from megatron_mtraining.errors import RankMismatchError

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    with pytest.raises(RankMismatchError) as refusal:
        mtraining.initialize(tiny_gpt.SPARSE, inner_size=1 + dist.get_rank())
    parallel_state.destroy_model_parallel()
    return str(refusal.value)


def test_ranks_that_initialise_differently_are_named():
    first, second = run_on_ranks(refusal_of_other_arguments, 2)
    assert "with inner_size 1 on rank 0" in first and first.endswith("with inner_size 2 on rank 1.")
    assert "with inner_size 2 on rank 1" in second and second.endswith("with inner_size 1 on rank 0.")


def left_after_destroy(job_ends_first: bool) -> list[str]:
    """Which of the ring's groups torch still knows after destroy(), of two initialisations."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_mtraining import megatron as mtraining

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    left = []
    for _ in range(2):
        groups = mtraining.initialize(tiny_gpt.SPARSE, inner_size=1).ring_groups
        if job_ends_first:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        mtraining.destroy()
        made = [field.name for field in dataclasses.fields(groups) if field.name != "cp"]
        left += [name for name in made if is_known(getattr(groups, name))]
        mtraining.destroy()
        if job_ends_first:  # the rank ends with a job to destroy
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            return left
    parallel_state.destroy_model_parallel()
    return left


def is_known(group: Any) -> bool:
    import torch.distributed as dist

    try:
        return bool(dist.get_backend(group))
    except ValueError:
        return False


@pytest.mark.parametrize("job_ends_first", [False, True])
def test_destroy_ends_the_groups_of_the_ring(job_ends_first: bool):
    assert run_on_ranks(left_after_destroy, 2, job_ends_first=job_ends_first) == [[], []]


def sentences_of_disagreement() -> list[str]:
    from megatron.core import parallel_state

    from megatron_mtraining import megatron as mtraining
    from megatron_mtraining.megatron import runtime as module

    parallel_state.initialize_model_parallel(context_parallel_size=2, hierarchical_context_parallel_sizes=[2, 1])
    calls = [lambda: mtraining.initialize(tiny_gpt.SPARSE, inner_size=1)]
    mtraining_config = dataclasses.replace(tiny_gpt.SPARSE, num_probe_rows=8)
    refusals = [refusal(call) for call in calls]
    mtraining.initialize(tiny_gpt.SPARSE)
    refusals.append(refusal(lambda: mtraining.initialize(mtraining_config)))
    refusals.append(refusal(lambda: mtraining.initialize(tiny_gpt.SPARSE, inner_size=1)))
    other = SimpleNamespace(cp=parallel_state.get_data_parallel_group())
    refusals.append(refusal(lambda: module.current_runtime() and attention_of(other)))
    mtraining.destroy()
    parallel_state.destroy_model_parallel()
    return refusals


def attention_of(pg_collection: Any) -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_mtraining import megatron as mtraining

    return mtraining.MTrainingCoreAttention(
        config=tiny_gpt.transformer_config(),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        pg_collection=pg_collection,
    )


def refusal(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def test_sizes_that_disagree_are_refused():
    for sentences in run_on_ranks(sentences_of_disagreement, 2):
        assert sentences[0].startswith("inner_size must be 2, the first of hierarchical_context_parallel_sizes, got 1.")
        assert sentences[1].startswith("config must be that of the earlier call")
        assert sentences[2].startswith("inner_size must be 2 as in the earlier call, got 1. Call")
        assert sentences[3].startswith("pg_collection.cp must be the context-parallel group of ranks (0, 1)")


def phases() -> dict[str, list[int]]:
    """The widest slash lists of both layers: in the warm-up, after it, in a dense evaluation and after that."""
    from megatron_mtraining import megatron as mtraining

    config = dataclasses.replace(tiny_gpt.SPARSE, dense_warmup_steps=2, dense_layers=(2,))
    seen = {}
    with tiny_gpt.parallel_job(config):
        model = tiny_gpt.build(tiny_gpt.sparse_spec())

        def distances() -> list[int]:
            with mtraining.record_attention() as recorder:
                loss = tiny_gpt.mean_loss(model, tiny_gpt.batch(), config)
            seen["differentiable"] = loss.requires_grad
            return [int(recorder.layers[layer].index.num_slash.max()) for layer in (1, 2)]

        for step in (0, 1, 2):
            mtraining.set_training_step(step)
            seen[f"step {step}"] = distances()
        with mtraining.dense_evaluation():
            with mtraining.dense_evaluation():
                pass
            seen["evaluation"] = distances()
            assert not seen["differentiable"]
        with mtraining.record_attention() as outer:
            seen["after"] = distances()
            assert not outer.layers
            tiny_gpt.mean_loss(model, tiny_gpt.batch(), config)
            assert set(outer.layers) == {1, 2}
        assert seen.pop("differentiable")
    return seen


def test_dense_warm_up_dense_layers_and_dense_evaluation():
    (seen,) = run_on_ranks(phases, 1)
    dense = tiny_gpt.SEQ_LEN // tiny_gpt.SPARSE.block_size
    sparse = [tiny_gpt.SPARSE.local_blocks + tiny_gpt.SPARSE.max_slash, dense]
    assert seen == {
        "step 0": [dense, dense],
        "step 1": [dense, dense],
        "step 2": sparse,
        "evaluation": [dense, dense],
        "after": sparse,
    }


def records() -> dict[str, Any]:
    """What is recorded of a model with a softmax scale of its own, and of what is selected with it and without it."""
    from megatron_mtraining import megatron as mtraining
    from megatron_mtraining import select

    with tiny_gpt.parallel_job(cp_size=2, inner_size=1) as runtime:
        model = tiny_gpt.build(tiny_gpt.sparse_spec(), config=tiny_gpt.transformer_config(softmax_scale=3.0))
        with mtraining.record_attention(capture_query_key=True) as recorder:
            tiny_gpt.mean_loss(model, tiny_gpt.batch())
        before = recorder.layers[1]
        tiny_gpt.mean_loss(model, tiny_gpt.batch(seed=1))
        where = {"layout": before.layout, "groups": runtime.cp_group}
        own, default = (
            select(before.query, before.key, tiny_gpt.SPARSE, softmax_scale=scale, **where).tensors
            for scale in (3.0, None)
        )
        return {
            "scale": before.softmax_scale,
            "selected": [all(map(torch.equal, tables, before.index.tensors)) for tables in (own, default)],
            "layers": sorted(recorder.layers),
            "kept": recorder.layers[1] is before,
            "stopped": mtraining.runtime.process().observers == [],
            "layout": before.layout,
            "shapes": (tuple(before.query.shape), tuple(before.key.shape)),
            "detached": not before.query.requires_grad and not before.key.requires_grad,
        }


def test_layers_are_recorded_while_asked_for():
    for seen in run_on_ranks(records, 2):
        assert seen["layers"] == [1, 2]
        assert seen["kept"]
        assert seen["stopped"]
        assert seen["detached"]
        assert (seen["scale"], seen["selected"]) == (3.0, [True, False]), "the model's scale is the selection's"
        assert (seen["layout"].kind, seen["layout"].seq_len, seen["layout"].cp_size) == ("striped", 192, 2)
        assert seen["shapes"] == ((1, 96, 4, 8), (1, 96, 2, 8))


@pytest.mark.parametrize(
    ("rank_lists", "hosts", "inner_size"),
    [
        ([(0, 1, 2, 3)], "aaaa", 4),
        ([(0, 1, 2, 3)], "aabb", 2),
        ([(0, 2, 4, 6), (1, 3, 5, 7)], "aaaabbbb", 2),
        ([(0, 1, 2), (3, 4, 5)], "aaabbb", 3),
        ([(0, 1, 2, 3)], "aaab", 1),
        ([(0, 1, 2, 3, 4)], "aabbb", 1),
        ([tuple(range(10))], "aaaabbbbbb", 2),
        ([(0, 4), (1, 5), (2, 6), (3, 7)], "aaaabbbb", 1),
    ],
)
def test_an_inner_ring_stays_on_its_host(rank_lists: list[tuple[int, ...]], hosts: str, inner_size: int):
    placement = Placement(rank_lists=tuple(rank_lists), hosts=tuple(hosts))
    assert placement.inner_size() == inner_size


def scaled_like_megatron(**options: Any) -> tuple[float, float]:
    """The loss of Megatron's own dense attention and of this one with every layer dense, in float64."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    dense = dataclasses.replace(tiny_gpt.SPARSE, dense_layers=(1, 2))
    with tiny_gpt.parallel_job(dense), torch.no_grad():
        specs = (get_gpt_layer_local_spec(normalization="RMSNorm"), tiny_gpt.sparse_spec())
        models = (tiny_gpt.build(spec, config=tiny_gpt.transformer_config(**options)).double() for spec in specs)
        stock, sparse = (tiny_gpt.mean_loss(model, tiny_gpt.batch(batch_size=2), dense).item() for model in models)
    return stock, sparse


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softmax_scale": 0.7},
        {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
        {"num_query_groups": 1},
        {"num_query_groups": 4, "kv_channels": 16},
    ],
    ids=str,
)
def test_dense_is_megatrons_own_attention(options: dict[str, Any]):
    ((stock, sparse),) = run_on_ranks(scaled_like_megatron, 1, **options)
    assert sparse == pytest.approx(stock, abs=1e-10)
