"""Megatron's ``--spec``: this attention for those who want no hook in its parser, as a function and as an object."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from . import tiny_gpt
from .ranks import run_on_ranks


def written(folder: Path, **changes: Any) -> str:
    """The file that ``MTRAINING_CONFIG`` shall name."""
    path = folder / "config.yaml"
    entries = dataclasses.asdict(dataclasses.replace(tiny_gpt.SPARSE, **changes))
    path.write_text(yaml.safe_dump(entries | {"dense_layers": list(entries["dense_layers"])}))
    return str(path)


def groups_of_two(config_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a training script has made when Megatron asks for the spec."""
    from megatron.core import parallel_state, tensor_parallel

    monkeypatch.setenv("MTRAINING_CONFIG", config_file)
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def losses_of_both(config_file: str) -> tuple[list[float], list[str]]:
    """Losses of the model that the function describes, and then the object; and what attends in them."""
    from megatron_mtraining.megatron import spec

    with pytest.MonkeyPatch.context() as monkeypatch:
        groups_of_two(config_file, monkeypatch)
        config = tiny_gpt.transformer_config(transformer_impl="local")
        losses, attentions = [], []
        for describe in (lambda: spec.gpt(types.SimpleNamespace(transformer=config)), lambda: object_of_flags(config)):
            model = tiny_gpt.build(describe(), config=config).double()
            losses.append(tiny_gpt.loss_and_gradients(model, tiny_gpt.batch())[0])
            attentions += [type(layer.self_attention.core_attention).__name__ for layer in model.decoder.layers]
        tiny_gpt.end_job()
    return losses, attentions


def object_of_flags(config: Any, **flags: Any) -> Any:
    """What importing the object gives, where Megatron's flags say ``config``."""
    args = types.SimpleNamespace(**({"virtual_pipeline_model_parallel_size": None} | flags))
    training, arguments = types.ModuleType("megatron.training"), types.ModuleType("megatron.training.arguments")
    training.get_args, arguments.core_transformer_config_from_args = lambda: args, lambda _: config
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(sys.modules, "megatron.training", training)
        monkeypatch.setitem(sys.modules, "megatron.training.arguments", arguments)
        monkeypatch.delitem(sys.modules, "megatron_mtraining.megatron.spec_object", raising=False)
        return importlib.import_module("megatron_mtraining.megatron.spec_object").gpt


def loss_of_one_rank() -> float:
    with tiny_gpt.parallel_job():
        model = tiny_gpt.build(tiny_gpt.sparse_spec(), config=tiny_gpt.transformer_config()).double()
        return tiny_gpt.loss_and_gradients(model, tiny_gpt.batch())[0]


def test_models_of_either_attend_as_those_of_the_layer_spec(tmp_path: Path):
    (expected,) = run_on_ranks(loss_of_one_rank, 1)
    for losses, attentions in run_on_ranks(losses_of_both, 2, config_file=written(tmp_path)):
        assert losses == [pytest.approx(expected, abs=1e-10)] * 2
        assert attentions == ["MTrainingCoreAttention"] * 4


def refusals(config_file: str) -> list[str]:
    """What is not done by ``--spec``, in sentences: prediction layers, a warm-up, stages that take turns."""
    from megatron_mtraining.megatron import spec

    with pytest.MonkeyPatch.context() as monkeypatch:
        groups_of_two(config_file, monkeypatch)
        config = tiny_gpt.transformer_config(transformer_impl="local")
        predicts = tiny_gpt.transformer_config(transformer_impl="local", mtp_num_layers=1)
        calls = (
            lambda: spec.gpt(predicts),
            lambda: spec.gpt(config),
            lambda: object_of_flags(config, virtual_pipeline_model_parallel_size=2),
        )
        sentences = [sentence_of(call) for call in calls]
        tiny_gpt.end_job()
    return sentences


def sentence_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as refusal:
        call()
    return str(refusal.value)


def test_what_a_spec_cannot_do_is_refused(tmp_path: Path):
    launcher = "Start the script with python -m megatron_mtraining and --attention-backend mtraining."
    for sentences in run_on_ranks(refusals, 2, config_file=written(tmp_path, dense_warmup_steps=3)):
        assert sentences == [
            f"--mtp-num-layers must be absent with --spec, got 1. {launcher}",
            f"dense_warmup_steps must be 0 with --spec, got 3. {launcher}",
            "--virtual-pipeline-model-parallel-size must be absent with a spec object, got 2. "
            "One object has one stage.",
        ]


def test_an_object_is_imported_where_there_are_groups():
    assert not torch.distributed.is_initialized()
    with pytest.raises(RuntimeError, match="--spec must be megatron_mtraining.megatron.spec gpt in this Megatron, got"):
        importlib.import_module("megatron_mtraining.megatron.spec_object")
