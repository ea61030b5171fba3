"""A Megatron-LM tree with the source patch trains without the launcher as a stock tree does with it."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from tests.programs import run_program
from tools.patch_megatron import apply, known_patches

from .jobs import LAUNCHER, SPARSE, train

spec = importlib.util.find_spec("megatron.core")
INSTALLED = Path(spec.submodule_search_locations[0]).parent if spec else None
pytestmark = pytest.mark.skipif(
    INSTALLED is None or not (INSTALLED / "training").is_dir(),
    reason="needs megatron.training, which the wheels of megatron-core hold from 0.19 on",
)

PARSE = """\
import sys
sys.modules["megatron_mtraining"] = None  # as if it were not installed
import argparse
from megatron.training.arguments import add_megatron_arguments, validate_args
flags = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
flags += " --micro-batch-size 1 --lr 1e-3 --train-iters 1 --no-rope-fusion --no-gradient-accumulation-fusion"
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
for backend in ("auto", "mtraining"):
    args = parser.parse_args([*flags.split(), "--attention-backend", backend])
    args.rank, args.world_size = 0, 1
    try:
        validate_args(args)
        print("valid:", backend)
    except ImportError as error:
        print("ImportError:", error)
"""


@pytest.fixture(scope="module")
def patched(tmp_path_factory) -> Path:
    """The installed release with its patch."""
    tree = tmp_path_factory.mktemp("patched")
    shutil.copytree(INSTALLED, tree / "megatron")
    apply(tree, known_patches())
    return tree


def test_losses_are_those_of_the_launcher(patched, tmp_path):
    flags = (*SPARSE, "--train-iters", 2, "--mtraining-dense-warmup-steps", 1, "--eval-iters", 1)
    stock = train(*flags, cp_size=2, folder=tmp_path)
    built_in = train(*flags, cp_size=2, launcher=(), tree=patched, folder=tmp_path)
    both = train(*flags, cp_size=2, launcher=LAUNCHER, tree=patched, folder=tmp_path)
    assert len(stock.losses) == 2
    assert built_in.losses == both.losses == stock.losses
    assert "core_attention of GPTModel's transformer_layer_spec replaced." in "\n".join(built_in.said)
    assert both.said.count("1 core_attention of GPTModel's transformer_layer_spec replaced.") == 1
    assert "mtraining iteration        2 | executed throughput" in built_in.output


def test_without_the_package_only_its_choice_fails(patched):
    """Everything else stays as it was."""
    run = run_program("-c", PARSE, environment={"PYTHONPATH": str(patched)})
    assert "valid: auto" in run.stdout, run.stderr
    assert "ImportError: --attention-backend mtraining needs the package megatron-mtraining. Install it" in run.stdout
