"""The hooks go on once, come off again, do nothing unasked, and swap the attention of any model that asks."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.megatron import hooks, install, uninstall
from megatron_mtraining.megatron.compat import MissingSymbolError, has_module, models
from megatron_mtraining.megatron.hooks import UsageError
from megatron_mtraining.megatron.runtime import process
from megatron_mtraining.megatron.split import REPLACEMENTS, TokenSplit

from . import tiny_gpt
from .ranks import run_on_ranks

needs_training = pytest.mark.skipif(not has_module("megatron.training"), reason="no megatron.training in this wheel")


@pytest.fixture(autouse=True)
def unhooked() -> Iterator[None]:
    yield
    uninstall()


def targets() -> dict[str, Any]:
    """What the hooks wrap, as it is now."""
    import megatron.core.parallel_state as state
    from megatron.core.models.gpt import GPTModel

    return {"groups": state.initialize_model_parallel, "end": state.destroy_model_parallel, "model": GPTModel.__init__}


def test_they_go_on_once_and_come_off():
    before = targets()
    names = install()
    hooked = targets()
    assert all(hooked[name] is not before[name] for name in before)
    assert install() == names
    assert targets() == hooked
    uninstall()
    assert targets() == before


def wrapped_names() -> Iterator[str]:
    """The names that the sources wrap, whatever the release; of ``f"{model}.forward"`` the end."""
    for path in Path(hooks.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("wrap") and len(node.args) > 2:
                name = node.args[1].values[-1] if isinstance(node.args[1], ast.JoinedStr) else node.args[1]
                yield name.value.removesuffix(".__init__").rpartition(".")[2]


def test_the_docstring_names_every_function_that_is_replaced():
    names = {name.rpartition(".")[2] for name in install()}
    split = TokenSplit("striped", 64, None)
    names |= {original.__name__ for replacements in REPLACEMENTS for original, _ in replacements(split)}
    names |= set(wrapped_names())
    assert len(names) > 20
    documented = {part.rpartition(".")[2] for part in re.findall(r"``([\w.]+)``", install.__doc__)}
    assert names - {""} <= documented


def test_the_meter_ends_with_them():
    install()
    stopped = []
    process().meter = Namespace(stop=lambda: stopped.append(True))
    process().observers.append(process().meter)
    uninstall()
    assert process().meter is None and process().observers == [] and stopped == [True]


def test_signatures_stay_as_they_were():
    before = {name: inspect.signature(target) for name, target in targets().items()}
    install()
    assert {name: inspect.signature(target) for name, target in targets().items()} == before


def test_a_missing_symbol_is_named_and_nothing_stays_wrapped():
    import megatron.core.parallel_state as state

    before = targets()
    del state.destroy_model_parallel
    try:
        with pytest.raises(MissingSymbolError, match=r"parallel_state\.destroy_model_parallel must exist.*core 0\.16"):
            install()
    finally:
        state.destroy_model_parallel = before["end"]
    assert targets() == before


def losses_of_models(cp_size: int, backend: str) -> tuple[float, list[str]]:
    """The loss of a model that asks for ``backend`` by its configuration alone, and its core attentions."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnBackend

    install(tiny_gpt.SPARSE)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    original = spec.submodules.self_attention.submodules.core_attention
    with tiny_gpt.parallel_job(cp_size=cp_size, inner_size=1):
        model = tiny_gpt.build(spec, config=tiny_gpt.transformer_config(attention_backend=AttnBackend[backend]))
        loss, _ = tiny_gpt.loss_and_gradients(model, tiny_gpt.batch())
    assert spec.submodules.self_attention.submodules.core_attention is original, "the script's own spec was changed"
    return loss, [type(layer.self_attention.core_attention).__name__ for layer in model.decoder.layers]


def loss_of_explicit_spec() -> float:
    with tiny_gpt.parallel_job():
        return tiny_gpt.loss_and_gradients(tiny_gpt.build(tiny_gpt.sparse_spec()), tiny_gpt.batch())[0]


def test_a_model_that_asks_gets_this_attention():
    expected = run_on_ranks(loss_of_explicit_spec, 1)[0]
    for loss, attentions in run_on_ranks(losses_of_models, 2, cp_size=2, backend="mtraining"):
        assert attentions == ["MTrainingCoreAttention"] * 2
        assert abs(loss - expected) < 1e-5


def keep_gpt(self: Any, config: Any, transformer_layer_spec: Any, mtp_block_spec: Any = None) -> None:
    """The part of GPTModel's constructor that needs no groups; so the next two, of hybrid models by either name."""
    self.specs = [transformer_layer_spec, mtp_block_spec]


def keep_hybrid(self: Any, config: Any, hybrid_stack_spec: Any) -> None:
    self.specs = [hybrid_stack_spec]


def keep_mamba(self: Any, config: Any, mamba_stack_spec: Any) -> None:
    self.specs = [mamba_stack_spec]


@pytest.mark.parametrize("hybrid", [False, True])
def test_every_spec_of_either_model_is_swapped(hybrid: bool, monkeypatch: pytest.MonkeyPatch):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnBackend

    from megatron_mtraining.megatron import MTrainingCoreAttention

    is_renamed = has_module("megatron.core.models.hybrid")
    place = models()[int(hybrid)]
    model = getattr(importlib.import_module(place[0]), place[1])
    keep = (keep_hybrid if is_renamed else keep_mamba) if hybrid else keep_gpt
    monkeypatch.setattr(model, "__init__", keep)
    monkeypatch.setattr(hooks, "ensure_runtime", lambda: None)
    monkeypatch.setattr(hooks, "current_runtime", lambda: Namespace(config=MTrainingConfig()))
    install()
    for name in ("mtraining", "auto"):
        made = Namespace()
        sizes = {"tensor_model_parallel_size": 1, "num_query_groups": 2}
        specs = [get_gpt_layer_local_spec(normalization="RMSNorm") for _ in place[2]]
        model.__init__(made, Namespace(attention_backend=AttnBackend[name], **sizes), *specs)
        swapped = [_attention_of(spec) is MTrainingCoreAttention for spec in made.specs]
        assert swapped == [name == "mtraining"] * len(place[2])


def _attention_of(spec: Any) -> Any:
    return spec.submodules.self_attention.submodules.core_attention


def refusal_of_a_model() -> str:
    """Two tensor-parallel ranks, one key/value head, whose query heads would share a list."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnBackend

    shared = dataclasses.replace(tiny_gpt.SPARSE, index_sharing="kv_group")
    install(shared)
    with tiny_gpt.parallel_job(shared, tp_size=2):
        options = {"num_query_groups": 1, "attention_backend": AttnBackend["mtraining"]}
        config = tiny_gpt.transformer_config(tensor_model_parallel_size=2, **options)
        with pytest.raises(ValueError) as refusal:
            tiny_gpt.build(get_gpt_layer_local_spec(normalization="RMSNorm"), config=config)
    return str(refusal.value)


def test_a_model_whose_groups_are_on_several_ranks_shares_no_lists():
    for sentence in run_on_ranks(refusal_of_a_model, 2):
        assert sentence.startswith("index_sharing must be head with more tensor-parallel ranks than key/value heads")


def test_a_model_that_does_not_ask_keeps_its_own():
    ((_, attentions),) = run_on_ranks(losses_of_models, 1, cp_size=1, backend="auto")
    assert attentions == ["DotProductAttention"] * 2


def test_steps_are_told_around_training_and_before_an_evaluation(monkeypatch: pytest.MonkeyPatch):
    """A run may begin with an evaluation, or evaluate and end; dense phases have to know where it stands."""
    told: list[Any] = []
    monkeypatch.setattr(hooks, "is_initialized", lambda: True)
    monkeypatch.setattr(hooks, "set_training_step", told.append)
    hooks._train_step(lambda iteration: told.append("trains"), iteration=4)
    hooks._evaluate(lambda iteration: told.append("evaluates"), 7)
    assert told == [4, "trains", 5, 7, "evaluates"]


def test_a_script_without_a_model_of_these_is_refused():
    process().args = Namespace()
    sentence = "--attention-backend must be another for a script without GPTModel and HybridModel, got mtraining. Only"
    with pytest.raises(UsageError, match=sentence):
        hooks.count_step(0)
    process().model_built = True
    hooks.count_step(0)


def keep_model(self: Any, model: Any) -> None:
    """The part of a constructor of Megatron's that needs no model."""
    self.model = model


def test_generating_text_is_refused_and_rollouts_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from megatron.core.inference.model_inference_wrappers import abstract_model_inference_wrapper as wrappers
    from megatron.core.transformer.enums import AttnBackend

    monkeypatch.setattr(wrappers.AbstractModelInferenceWrapper, "__init__", keep_model)
    install()

    def wrapped(model: Any) -> dict[str, Any]:
        made = Namespace()
        wrappers.AbstractModelInferenceWrapper.__init__(made, model)
        return vars(made)

    asks, other = (
        Namespace(module=Namespace(config=Namespace(attention_backend=AttnBackend[name])))
        for name in ("mtraining", "auto")
    )
    assert wrapped(other) == {"model": other}
    with pytest.raises(UsageError, match="--attention-backend must be another to generate text, got mtraining. This i"):
        wrapped(asks)
    process().args = Namespace(perform_rl_step=True)
    assert wrapped(asks) == {"model": asks}
    assert "rollouts are generated with Megatron's own attention to every key" in capsys.readouterr().out


@needs_training
def test_a_configuration_container_reaches_the_same_dataclass():
    pytest.importorskip("omegaconf", reason="Megatron's configuration container is read with omegaconf")
    from megatron.training.config.instantiate_utils import instantiate

    install()
    backend = {"_target_": "megatron.core.transformer.enums.AttnBackend", "_call_": True, "_args_": ["mtraining"]}
    config = {"_target_": "megatron_mtraining.MTrainingConfig", "layout": "zigzag", "dense_layers": [1]}
    assert instantiate(backend).name == "mtraining"
    assert instantiate(config) == MTrainingConfig(layout="zigzag", dense_layers=(1,))


@needs_training
def test_flags_are_megatrons_own():
    import argparse

    install(MTrainingConfig(layout="rotated"))
    from megatron.training import arguments

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(["--attention-backend", "mtraining", "--mtraining-num-probe-rows", "128"])
    assert (args.attention_backend.name, args.mtraining_num_probe_rows, args.mtraining_layout) == (
        "mtraining",
        128,
        "rotated",
    )


def test_the_given_configuration_is_forgotten_with_the_hooks():
    install(MTrainingConfig(num_probe_rows=128))
    assert process().config().num_probe_rows == 128
    uninstall()
    assert process().config() == MTrainingConfig()


@needs_training
def test_a_file_of_defaults_that_is_not_there_is_the_users_to_change(monkeypatch: pytest.MonkeyPatch):
    from megatron.training import arguments

    install()
    monkeypatch.setenv("MTRAINING_CONFIG", "none.yaml")
    with pytest.raises(UsageError, match="the YAML file must be readable, got none.yaml"):
        arguments.add_megatron_arguments(ArgumentParser())
