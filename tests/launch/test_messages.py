"""Wrong flags: what Megatron raises for them becomes a sentence that names them, where this backend is chosen."""

from __future__ import annotations

import argparse
import enum
import sys
from types import SimpleNamespace

import pytest

from megatron_mtraining import MTrainingConfig
from megatron_mtraining.arguments import add_arguments
from megatron_mtraining.errors import invalid
from megatron_mtraining.launch import messages
from megatron_mtraining.launch.messages import chooses, print_errors_once, print_how_to_start, start_command
from megatron_mtraining.megatron.runtime import process

CHOSEN = ["train.py", "--attention-backend", "mtraining"]
JOB = ("MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK")


class Backend(enum.Enum):
    """As Megatron's."""

    flash = 1
    mtraining = 2


def parser() -> argparse.ArgumentParser:
    """Reads enums as Megatron does in its oldest and newest release."""
    made = argparse.ArgumentParser(allow_abbrev=False)
    made.add_argument("--attention-backend", type=lambda name: Backend[name], choices=list(Backend))
    made.add_argument("--scopes", type=lambda name: Backend[name], nargs="+")
    made.add_argument("--lr", type=float)
    print_errors_once(add_arguments(made))
    return made


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--attention-backend mtrainning",
            "argument --attention-backend: invalid choice: 'mtrainning' (choose from flash, mtraining). "
            "Did you mean mtraining?",
        ),
        ("--attention-backend 7", "argument --attention-backend: invalid choice: '7' (choose from flash, mtraining)"),
        ("--scopes flash nothing", "argument --scopes: invalid choice: 'nothing'"),
        ("--lr x", "argument --lr: invalid float value: 'x'"),
        (
            "--mtraining-num-probe-row=3 --lr 1",
            "unrecognized arguments: --mtraining-num-probe-row=3. Did you mean --mtraining-num-probe-rows",
        ),
    ],
)
def test_what_the_parser_cannot_read_is_one_sentence(words, sentence, capsys, monkeypatch):
    for name in JOB:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(words.split())
    said = capsys.readouterr().err
    assert said.startswith(f"mtraining: error: {sentence}") and said.count("\n") == 1


def test_what_the_parser_can_read_is_read():
    args = parser().parse_args("--attention-backend mtraining --scopes flash --lr 2".split())
    assert (args.attention_backend, args.scopes, args.lr) == (Backend.mtraining, [Backend.flash], 2.0)


@pytest.fixture
def raised(monkeypatch):
    """The error of a call, with the flags of a run that chooses this backend."""
    monkeypatch.setattr(sys, "argv", CHOSEN)
    names = ("num_attention_heads", "tensor_model_parallel_size", "context_parallel_size")
    monkeypatch.setattr(process(), "flags", {name: "--" + name.replace("_", "-") for name in names})

    def call(function, *args, **kwargs):
        try:
            function(*args, **kwargs)
        except Exception as error:
            return error
        raise AssertionError("nothing was raised")

    return call


def test_megatrons_check_of_a_model_names_the_flags(raised, monkeypatch):
    from megatron.core.transformer import TransformerConfig

    def make():
        TransformerConfig(num_layers=1, hidden_size=30, num_attention_heads=3, tensor_model_parallel_size=2)

    error = raised(make)
    sentence = messages.sentence_of(error)
    assert sentence.startswith("--num-attention-heads and --tensor-model-parallel-size must be what Megatron-LM checks")
    assert sentence.endswith(", got 3 and 2.") and "transformer_config.py, line" in sentence
    monkeypatch.setattr(sys, "argv", ["train.py", "--attention-backend", "flash"])
    assert messages.sentence_of(error) is None, "a run without this backend is Megatron's alone"


def of_a_check(monkeypatch, source: str):
    """A function that stands where Megatron's ``validate_args`` does."""
    scope = {"__name__": "megatron.training.arguments"}
    exec(compile(source, "/checks/arguments.py", "exec"), scope)
    lines = [line + "\n" for line in source.splitlines()]
    monkeypatch.setitem(messages.linecache.cache, "/checks/arguments.py", (len(source), None, lines, "/checks"))
    return scope["validate_args"]


ASSERTS = "def validate_args(args):\n    assert args.context_parallel_size == 1\n"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (ASSERTS, "arguments.py, line 2: args.context_parallel_size == 1, got 6."),
        (ASSERTS.replace(" == 1", " == 1, 'One\\n only'"), "arguments.py, line 2: One only, got 6."),
        (
            "def validate_args(args):\n    if args.context_parallel_size > 1:\n        raise OSError('Too many')\n",
            "arguments.py, line 3: Too many, got 6.",
        ),
        (
            "def validate_args(args):\n    return {1: 2}[args.context_parallel_size]\n",
            "arguments.py, line 2: {1: 2}[args.context_parallel_size], got 6.",
        ),
    ],
)
def test_a_bare_check_is_read_from_its_source(raised, monkeypatch, source, sentence):
    args = SimpleNamespace(context_parallel_size=6)
    error = raised(of_a_check(monkeypatch, source), args)
    assert messages.sentence_of(error) == f"--context-parallel-size must be what Megatron-LM checks in {sentence}"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"hierarchical_context_parallel_sizes": [2, 2]},
            "--hierarchical-context-parallel-sizes must be sizes whose product is --context-parallel-size, "
            "got 2 2 with --context-parallel-size 2. ",
        ),
        (
            {"world_size": 3},
            "the number of ranks must be a multiple of the parallel sizes, got --tensor-model-parallel-size 1 times "
            "--pipeline-model-parallel-size 1 times --context-parallel-size 2 on 3 ranks. ",
        ),
        ({"context_parallel_size": 0}, "the number of ranks must be a multiple of the parallel sizes, got "),
        ({"seq_length": 100}, "--seq-length must be a multiple of ranks and block size for --mtraining-layout, got "),
        ({"mtraining_num_probe_rows": 0}, "num_probe_rows must be an integer of at least 1, got 0."),
    ],
)
def test_sizes_that_megatron_refuses_are_told_with_what_to_do(raised, monkeypatch, changes, sentence):
    sizes = {"world_size": 2, "context_parallel_size": 2, "seq_length": 256}
    sizes |= dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size"), 1)
    args = SimpleNamespace(**(vars(add_arguments(argparse.ArgumentParser()).parse_args([])) | sizes | changes))
    refusing = of_a_check(monkeypatch, "def validate_args(args):\n    assert False\n")
    assert messages.sentence_of(raised(refusing, args)).startswith(sentence)


def test_errors_that_are_not_about_flags_keep_their_traceback(raised):
    def refuse():
        raise invalid("window", "small", 3)

    def train_step(iteration):
        refuse()

    assert messages.sentence_of(raised(refuse)) == "window must be small, got 3."
    assert messages.sentence_of(raised(train_step, 1)) is None
    assert messages.sentence_of(raised(lambda: {}["x"])) is None
    assert (
        messages.sentence_of(raised(MTrainingConfig, num_probe_rows=0))
        == "num_probe_rows must be an integer of at least 1, got 0."
    )


def test_a_start_without_torchrun_is_told(raised, monkeypatch, capsys):
    import torch.distributed as dist

    for name in JOB:
        monkeypatch.delenv(name, raising=False)
    argv = [*CHOSEN, "--context-parallel-size", "4", "--tensor-model-parallel-size=2"]
    command = "torchrun --nproc-per-node 8 -m megatron_mtraining train.py and its flags"
    assert start_command(argv) == command
    print_how_to_start(argv)
    assert capsys.readouterr().err.endswith(f"start it with {command}.\n")
    for quiet in (["train.py"], ["train.py", "--attention-backend", "auto"]):
        print_how_to_start(quiet)
    monkeypatch.setenv("MASTER_ADDR", "here")
    print_how_to_start(argv)
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.setattr(sys, "argv", argv)
    error = raised(dist.init_process_group, "gloo", rank=0, world_size=1)
    expected = f"MASTER_ADDR must be set for ranks to find each other, got none. Start it with {command}."
    assert messages.sentence_of(error) == expected


def test_the_choice_is_read_as_argparse_reads_it():
    assert chooses(["--attention-backend=mtraining"]) and chooses(["--attention-backend", "mtraining"])
    assert not chooses([]) and not chooses(["--attention-backend"]) and not chooses(["mtraining"])
    assert not chooses(["--attention-backend", "mtraining", "--attention-backend", "auto"])
