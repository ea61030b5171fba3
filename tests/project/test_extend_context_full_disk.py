"""A disk that is full at every write in turn: one sentence, and the next run ends with what an undisturbed one makes.

Megatron's and Bridge's parts are stood in for by writers of small files; all else is the commands' own.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.extend_context import bridge, held_out, prepare_data, tokens, train, verify
from examples.extend_context.__main__ import COMMANDS, main
from tests.project.test_extend_context_config import QWEN2, write_source
from tests.project.test_extend_context_data import ByteTokenizer

indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")

CONFIG = """
output: out
model: {source: source, length: 2048}
data:
  sources: [{name: a, path: texts, pattern: "a*"}, {name: b, path: texts, pattern: "b*", held_out: true}]
train: {megatron_lm: ., seq_length: 16, steps: 4, save_every: 2}
"""


class Disk:
    """Writes that succeed ``room`` times, and then leave half of their content and fail until there is room again."""

    def __init__(self) -> None:
        self.room = 1 << 30

    def write(self, path: object, whole: object, half: object) -> None:
        """Call ``whole``, or ``half`` and raise."""
        if self.room:
            self.room -= 1
            whole()
            return
        half()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@pytest.fixture
def disk(monkeypatch) -> Disk:
    disk = Disk()
    write_text, copyfile = Path.write_text, shutil.copyfile
    builder, writer = indexed_dataset.IndexedDatasetBuilder, tokens._Writer
    add_document, finalize, write_tokens = builder.add_document, builder.finalize, writer._write

    def half_copy(source, target):
        Path(target).write_bytes(Path(source).read_bytes()[:2])

    def no_link(source, target):
        raise OSError(errno.EXDEV, "another file system")

    patches = {
        (Path, "write_text"): lambda path, text: disk.write(
            path, lambda: write_text(path, text), lambda: write_text(path, text[: len(text) // 2])
        ),
        (shutil, "copyfile"): lambda source, target: disk.write(
            target, lambda: copyfile(source, target), lambda: half_copy(source, target)
        ),
        (os, "link"): no_link,
        (builder, "add_document"): lambda self, document, lengths: disk.write(
            "data", lambda: add_document(self, document, lengths), lambda: self.data_file.write(b"half")
        ),
        (builder, "finalize"): lambda self, path: disk.write(
            path, lambda: finalize(self, path), lambda: Path(path).write_bytes(b"half")
        ),
        (writer, "_write"): lambda self, numbers: disk.write(
            "tokens", lambda: write_tokens(self, numbers), lambda: write_tokens(self, numbers[:1])
        ),
    }
    for (owner, name), function in patches.items():
        monkeypatch.setattr(owner, name, function)
    return disk


class Model:
    """Stands in for Megatron's model: its weights are a word."""

    def __init__(self, folder: Path, *, load_weights: bool = True) -> None:
        self.weights = (folder / "model.safetensors").read_text() if load_weights else None

    def save(self, target: Path) -> None:
        save_checkpoint(target, 0, self.weights)
        (target / "iter_0000000" / bridge.RUN_CONFIG).write_text("the model's description")

    def load(self, iteration: Path) -> None:
        self.weights = (iteration / "weights").read_text()

    def save_hf(self, target: Path) -> None:
        target.mkdir(parents=True)
        (target / "model.safetensors").write_text(self.weights)


def save_checkpoint(folder: Path, iteration: int, weights: str) -> None:
    (folder / f"iter_{iteration:07d}").mkdir(parents=True, exist_ok=True)
    (folder / f"iter_{iteration:07d}" / "weights").write_text(weights)
    (folder / bridge.TRACKER).write_text(str(iteration))


def train_steps(settings, script, config, *, has_gpu) -> None:
    """Train from the last checkpoint on, two steps at a time."""
    assert "--train-iters" in config.read_text()
    folder = settings.run_folder / "checkpoints"
    before = bridge.latest_iteration(folder)
    for step in range(int(before.name[5:]) if before else 0, settings.train.steps, 2):
        save_checkpoint(folder, step + 2, f"weights after {step + 2} steps")


@pytest.fixture
def workplace(tmp_path, monkeypatch, disk):
    monkeypatch.setattr(bridge, "MegatronModel", Model)
    monkeypatch.setattr(bridge, "start_megatron", lambda: None)
    monkeypatch.setattr(verify, "real_text", lambda *_: None)
    monkeypatch.setattr(verify, "compare", lambda *_: "logits equal")
    monkeypatch.setattr(train, "run_script", train_steps)
    monkeypatch.setattr(held_out, "NUM_PARTS", 1 << 30)  # documents are too short to be evaluated
    monkeypatch.setattr(prepare_data, "HuggingFaceTokenizer", lambda _: ByteTokenizer())
    for module in (prepare_data, tokens):
        quiet = SimpleNamespace(done=0, update=lambda *_: None, close=lambda: None)
        monkeypatch.setattr(module, "Progress", lambda *_, quiet=quiet, **__: quiet)

    def make(name: str) -> Path:
        folder = tmp_path / name
        (folder / "texts").mkdir(parents=True)
        monkeypatch.chdir(folder)
        write_source(folder / "source", QWEN2)
        (folder / "source/model.safetensors").write_text("weights")
        for text in ("a1", "a2", "b1"):
            (folder / "texts" / text).write_text(f"text {text} " * 9)
        (folder / "pretrain_gpt.py").touch()
        (folder / "extend.yaml").write_text(CONFIG)
        return folder

    return make


def written(folder: Path) -> dict[str, bytes]:
    # A run that continues loads another checkpoint: its launch config differs.
    files = [path for path in (folder / "out").rglob("*") if path.is_file() and path.name != "launch.yaml"]
    here, anywhere = str(folder).encode(), b"FOLDER"
    return {str(path.relative_to(folder)): path.read_bytes().replace(here, anywhere) for path in files}


@pytest.mark.parametrize("command", COMMANDS[:4])
def test_a_disk_that_is_full_at_every_write_in_turn(command, workplace, disk, capsys):
    line = ["--config", "extend.yaml"]
    expected = workplace("undisturbed")
    for each in COMMANDS[: COMMANDS.index(command) + 1]:
        assert main([each, *line]) == 0
    *_, sentence = capsys.readouterr().out.splitlines()

    for room in range(100):
        folder = workplace(f"room_{room}")
        for each in COMMANDS[: COMMANDS.index(command)]:
            assert main([each, *line]) == 0
        capsys.readouterr()
        disk.room = room
        status = main([command, *line])
        disk.room = 1 << 30
        if status == 0:
            break
        errors = capsys.readouterr().err
        assert status == 2
        assert errors.startswith(f"{command}: the disk must have room, got No space left on device")
        assert errors.count("\n") == 1
        assert main([command, *line]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == sentence
        assert written(folder) == written(expected), f"stopped at write {room}"
    assert room >= 3, "writes that failed"


def test_data_that_were_replaced_in_part_are_not_trained_on(workplace, disk, capsys):
    folder = workplace("changed")
    assert main(["prepare_data", "--config", "extend.yaml"]) == 0
    disk.room = 5  # for both data sets, not for the report
    assert main(["prepare_data", "--config", "extend.yaml", "train.seq_length=20"]) == 2
    with pytest.raises(ValueError, match="data must be prepared, got no .*report.json. Run prepare_data first"):
        prepare_data.data_paths(folder / "out/data", "train")
