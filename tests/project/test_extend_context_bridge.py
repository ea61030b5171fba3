"""The chain of examples/extend_context on tiny models: through Megatron-Bridge, pretrain_gpt.py and back.

Each command is a process of its own, as for a user. Needs Megatron-Bridge, so Python 3.12 (docs/extend_context.md), and
for training a Megatron-LM tree that MEGATRON_LM names.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.extend_context import bridge
from tests.programs import ROOT

TREES = [Path(part) for part in os.environ.get("MEGATRON_LM", "").split(os.pathsep) if part]

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not bridge.is_installed(), reason="Megatron-Bridge is not installed"),
]
needs_tree = pytest.mark.skipif(not TREES, reason="MEGATRON_LM names no Megatron-LM tree")

SPARSE = "{--mtraining-dense-below: 0, --mtraining-sink-tokens: 2, --mtraining-local-blocks: 1}"


def run(*arguments: object, folder: Path) -> str:
    """Standard output of ``python *arguments`` on one CPU thread."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    one_thread = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    environment = os.environ | one_thread | {"PYTHONPATH": path}
    line = [sys.executable, "-W", "ignore", *map(str, arguments)]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


CONVERT = """
import json, sys
from pathlib import Path

from examples.extend_context.bridge import MegatronModel, quiet, start_megatron
from examples.extend_context.model_folder import extended_config, read_model_config, write_model_folder
from examples.extend_context.settings import ModelSettings

if __name__ == "__main__":  # saving a checkpoint imports this file again
    quiet()
    from tests.project.extend_models import save_model
    from transformers import AutoModelForCausalLM

    folder = Path(sys.argv[1])
    for kind in ("llama", "qwen2", "qwen3"):
        save_model(kind, folder / kind)
    start_megatron()
    import torch

    from examples.extend_context.verify import compare
    from safetensors.torch import load_file

    found = {}
    tokens = torch.randint(0, 512, (1, 700), generator=torch.Generator().manual_seed(0))
    for kind, factor, truncate in json.loads(sys.argv[2]):
        name = f"{kind}-{factor}-{truncate}"
        settings = ModelSettings(source="none", length=256 * factor, truncate=truncate)
        write_model_folder(folder / kind, folder / name, extended_config(read_model_config(folder / kind), settings))
        model = MegatronModel(folder / name)
        compared = compare(folder / name, model, tokens)
        expected = load_file(folder / kind / "model.safetensors")
        actual = dict(model.hf_weights())
        equal = sum(torch.equal(expected[key], actual[key]) for key in expected if key in actual)
        found[name] = [compared.largest_difference, compared.largest_logit, equal, len(expected), len(actual)]
        plain = AutoModelForCausalLM.from_pretrained(folder / kind)
        with torch.no_grad():
            found[name].append(float((plain(tokens).logits - model.logits(tokens)).abs().max()))
    (folder / "found.json").write_text(json.dumps(found))
"""

CASES = [
    *(("llama", factor, True) for factor in (4, 8, 32)),
    *(("qwen2", factor, True) for factor in (4, 8, 32)),
    ("qwen2", 8, False),
    ("qwen3", 8, True),
]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    folder = tmp_path_factory.mktemp("converted")
    (folder / "convert.py").write_text(CONVERT)
    run("convert.py", folder, json.dumps(CASES), folder=folder)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("case", ["-".join(map(str, case)) for case in CASES])
def test_yarn_logits_and_a_bit_equal_round_trip(converted, case):
    difference, largest, equal, num_expected, num_actual, to_unscaled = converted[case]
    assert difference <= 2e-5 * largest
    assert to_unscaled > 100 * difference, "the YaRN entry changes what is computed"
    assert equal == num_expected == num_actual


def write_settings(folder: Path, kind: str) -> Path:
    path = folder / "extend.yaml"
    tree = TREES[-1] if TREES else "none"
    path.write_text(f"""
output: out
model: {{source: model, length: 1024, verify_text: {ROOT / "README.md"}, verify_tokens: 300}}
data:
  sources:
    - {{name: docs, path: {ROOT / "docs"}, pattern: "*.md"}}
    - {{name: notes, path: {ROOT / "CHANGELOG.md"}, held_out: true}}
train: {{megatron_lm: {tree}, seq_length: 512, steps: 4, save_every: 2, ranks: 2, learning_rate: 0.003,
        held_out_documents: 1, flags: {SPARSE}}}
""")
    program = "from tests.project.extend_models import Path, save_model"
    run("-c", f"{program}; save_model({kind!r}, Path('model'))", folder=folder)
    return path


@needs_tree
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_the_whole_chain(tmp_path, kind):
    def extend(command: str, *changes: str) -> str:
        output = run("-m", "examples.extend_context", command, "--config", config, *changes, folder=tmp_path)
        return [line for line in output.splitlines() if line.startswith(f"{command}: ")][-1]

    config = write_settings(tmp_path, kind)
    line = extend("prepare_model")
    assert "Megatron checkpoint in out/model_megatron: logits within" in line
    assert extend("prepare_model") == line, "finished: nothing is done again"
    assert "tokens to train on" in extend("prepare_data")

    # Stopped after two of four steps, and continued from the checkpoint.
    assert "iter_0000002" in extend("train", "train.steps=4", "train.flags={--exit-interval: 2, " + SPARSE[1:])
    line = extend("train")
    assert "iter_0000004" in line
    log = (tmp_path / "out/runs/mtraining/log.txt").read_text()
    assert log.count("lm loss") == 4
    assert "1 core_attention of GPTModel's transformer_layer_spec replaced" in log
    before, after = (float(part) for part in line.split("held-out loss ")[1].split(" nats")[0].split(" -> "))
    assert after < before
    assert (tmp_path / "out/runs/mtraining/checkpoints/iter_0000004/run_config.yaml").is_file()

    line = extend("export")
    assert "loaded in transformers, logits within" in line
    exported, prepared = tmp_path / "out/export/mtraining", tmp_path / "out/model"
    assert (exported / "config.json").read_text() == (prepared / "config.json").read_text()
    assert (exported / "model.safetensors").read_bytes() != (prepared / "model.safetensors").read_bytes()
    assert extend("export") == line

    # A dense run of the same seed begins with the same weights and data.
    dense = extend("train", "train.attention=dense", "train.flags={}")
    assert "out/runs/dense/checkpoints/iter_0000004" in dense
    assert abs(float(dense.split(" -> ")[1].split()[0]) - after) < 0.1 * after


SAVE = """
import sys
from pathlib import Path
from examples.extend_context.bridge import MegatronModel, start_megatron
if __name__ == "__main__":  # saving a checkpoint imports this file again
    start_megatron()
    MegatronModel(Path("model")).save(Path("checkpoint"))
"""


def test_losses_of_samples_equal_those_of_transformers(tmp_path):
    """The same perplexity and copy loss inside Megatron as by ``mtraining evaluate``, dense and sparse."""
    program = "from tests.project.extend_models import Path, save_model"
    run("-c", f"{program}; save_model('llama', Path('model'), max_position_embeddings=1024)", folder=tmp_path)
    (tmp_path / "save.py").write_text(SAVE)
    run("save.py", folder=tmp_path)
    flags = ("--mtraining-budget", "fixed", "--mtraining-max-vertical", 8, "--mtraining-max-slash", 0)
    flags += ("--mtraining-sink-tokens", 0, "--mtraining-local-blocks", 1)
    evaluate = ("-m", "megatron_mtraining", "evaluate", "model", "--tasks", "perplexity,copy", "--lengths", 700)
    evaluate += ("--text", ROOT / "README.md", "--samples", 2, "--device", "cpu", *flags)
    run(*evaluate, "--prepare", "samples", folder=tmp_path)
    run(*evaluate, "--prepared", "samples", "--out", "transformers", folder=tmp_path)
    lines = (tmp_path / "transformers/results_0_of_1.jsonl").read_text().splitlines()
    by_transformers = [json.loads(line) for line in lines]
    values = {}
    for inference, options in (("dense", ["--dense"]), ("mtraining", flags)):
        command = ("-m", "examples.extend_context.sample_losses", "model", "checkpoint", "--prepared", "samples")
        printed = run(*command, "--result", "losses.json", *options, folder=tmp_path)
        assert re.search(r"copy +700 +\d\.\d{4} +8", printed)
        actual = json.loads((tmp_path / "losses.json").read_text())
        expected = [entry for entry in by_transformers if entry["inference"] == inference]
        assert len(actual) == len(expected) == 2 + 8
        for ours, theirs in zip(actual, expected, strict=True):
            assert [ours[name] for name in ("benchmark", "number")] == [
                theirs[name] for name in ("benchmark", "number")
            ]
            assert ours["value"] == pytest.approx(theirs["value"], rel=1e-5)
        values[inference] = [entry["value"] for entry in actual]
    assert max(abs(a / b - 1) for a, b in zip(*values.values(), strict=True)) > 1e-3, "sparse attention is another"


@needs_tree
def test_the_recipe_of_bridge_trains_as_pretrain_gpt_does(tmp_path):
    """The same losses on one rank, on two, and through pretrain_gpt.py; export finds the checkpoint."""
    config = write_settings(tmp_path, "qwen2")
    for command in ("prepare_model", "prepare_data"):
        run("-m", "examples.extend_context", command, "--config", config, folder=tmp_path)
    program = Path(__file__).with_name("bridge_program.py")
    losses = []
    for ranks in (1, 2):
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
        changes = (f"train.ranks={ranks}", f"train.run=bridge_{ranks}")
        log = run(*torchrun, program, "--config", config, *changes, folder=tmp_path)
        assert "1 core_attention of GPTModel's transformer_layer_spec replaced" in log
        losses.append(losses_of(log))
    run("-m", "examples.extend_context", "train", "--config", config, folder=tmp_path)
    expected = losses_of((tmp_path / "out/runs/mtraining/log.txt").read_text())
    expected[1] = 2 * expected[1] - expected[0]  # Megatron's log of the second step is the mean of the first two
    assert len(expected) == 4
    for found in losses:
        assert found == pytest.approx(expected, abs=5e-6)
    exported = run("-m", "examples.extend_context", "export", "--config", config, "train.run=bridge_2", folder=tmp_path)
    assert "of iter_0000004 loaded in transformers, logits within" in exported


def losses_of(log: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", log)]
