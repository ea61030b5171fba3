"""Data preparation of examples/extend_context against a slow definition, on every machine."""

from __future__ import annotations

import gzip
import json
import resource
import signal
from pathlib import Path

import numpy
import pytest

from examples.extend_context import documents, tokens
from examples.extend_context.__main__ import main
from examples.extend_context.documents import BLOCK_CHARS, cut_text, read_documents
from examples.extend_context.mds import read_samples
from examples.extend_context.prepare_data import prepare_data
from examples.extend_context.settings import DataSettings, ModelSettings, Settings, Source, TrainSettings
from examples.extend_context.tokenizer import check_vocabulary
from examples.extend_context.tokens import tokenise_source

indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")

END = 300


class ByteTokenizer:
    """A token for each byte; the text's end is token 300."""

    vocab_size, end_of_document, identity = 301, END, "bytes"

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, texts):
        self.calls += 1
        return [list(text.encode()) for text in texts]

    def decode(self, numbers):
        return bytes(int(number) for number in numbers if number < 256).decode(errors="replace")


class Interrupted(Exception):
    """The planted end of a run."""


def settings_for(folder: Path, *sources: Source, held_out_share: float = 0.0, seq_length: int = 16) -> Settings:
    return Settings(
        output=str(folder / "out"),
        model=ModelSettings(source="none", length=1024),
        data=DataSettings(sources=sources, held_out_share=held_out_share),
        train=TrainSettings(megatron_lm="none", seq_length=seq_length, steps=1),
    )


def prepared(settings: Settings, part: str, name: str) -> list[list[int]]:
    data_set = indexed_dataset.IndexedDataset(str(settings.data_folder / f"{name}_{part}"))
    return [data_set[number].tolist() for number in range(len(data_set))]


def by_definition(texts: list[str]) -> list[list[int]]:
    """Tokens of each text that has some, its end included, the longest first and equal ones in their order."""
    return sorted(([*text.encode(), END] for text in texts if text), key=len, reverse=True)


def write_texts(folder: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, newline="")
    return folder


TEXTS = {
    "b/one.txt": "first line\nsecond\n",
    "b/z/deep.txt": "far below",
    "b/two.txt": "é€ and 𝄞",
    "a.txt": "x" * 70 + "\r\nend",
    "empty.txt": "",
    ".hidden.txt": "left out",
}
IN_ORDER = [TEXTS[name] for name in ("a.txt", "empty.txt", "b/one.txt", "b/two.txt", "b/z/deep.txt")]


def test_every_file_is_a_document(tmp_path, capsys):
    source = Source(name="files", path=str(write_texts(tmp_path / "in", TEXTS)))
    settings = settings_for(tmp_path, source)
    sentence = prepare_data(settings, ByteTokenizer())
    assert prepared(settings, "train", "files") == by_definition(IN_ORDER)
    expected = sum(map(len, by_definition(IN_ORDER)))
    assert f"files: {expected} tokens to train on, 0 held out" in sentence
    report = json.loads((settings.data_folder / "report.json").read_text())["sources"][0]
    assert (report["empty_documents"], report["train"]["documents"], report["train"]["longest"]) == (1, 4, 76)
    assert report["train"]["up_to"] == {"16": [2, 10 + 15], "32": [1, 19], "128": [1, 76]}
    assert "128          1            76" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("join", "expected"),
    [
        ("folder", [f"{IN_ORDER[0]}\n\n", f"{IN_ORDER[2]}\n\n{IN_ORDER[3]}", IN_ORDER[4]]),
        ("all", ["\n\n".join(IN_ORDER)]),
    ],
)
def test_joined_files(tmp_path, join, expected):
    source = Source(name="joined", path=str(write_texts(tmp_path / "in", TEXTS)), join=join)
    settings = settings_for(tmp_path, source)
    prepare_data(settings, ByteTokenizer())
    assert prepared(settings, "train", "joined") == by_definition(expected)


RECORDS = [("alpha " * 9, "r1"), ("beta", "r1"), ("", "r2"), ("gamma\n\u2028line", "r3"), ("delta", "r1")]


def write_jsonl(path: Path) -> Path:
    lines = [json.dumps({"body": text, "repo": repo}) + "\n" for text, repo in RECORDS]
    content = (lines[0] + "\n" + "".join(lines[1:])).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet"])
@pytest.mark.parametrize("join", [None, "field:repo", "all"])
def test_records(tmp_path, ending, join):
    path = tmp_path / f"records{ending}"
    if ending == ".parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        parquet = pytest.importorskip("pyarrow.parquet")
        columns = {"body": [text for text, _ in RECORDS], "repo": [repo for _, repo in RECORDS]}
        parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    else:
        write_jsonl(path)
    source = Source(name="records", path=str(path), text="body", join=join)
    settings = settings_for(tmp_path, source)
    prepare_data(settings, ByteTokenizer())
    bodies = [text for text, _ in RECORDS]
    groups = {
        None: bodies,
        "all": ["\n\n".join(bodies)],
        "field:repo": ["\n\n".join(bodies[:2]), bodies[2], bodies[3], bodies[4]],
    }
    assert prepared(settings, "train", "records") == by_definition(groups[join])


def write_mds(folder: Path, samples: list[dict], *, packed: bool = False, samples_in_shard: int = 2) -> Path:
    """Write shards as MosaicML's writer does: columns ``domain`` (str), ``indices`` and ``input_ids`` (ndarray)."""
    folder.mkdir(parents=True)

    def array(values: numpy.ndarray) -> bytes:
        code = {"uint32": 32, "int64": 65}[values.dtype.name]
        shape = numpy.array(values.shape, numpy.uint16)
        return bytes([code, len(shape) << 2 | 1]) + shape.tobytes() + values.tobytes()

    shards = []
    for number, begin in enumerate(range(0, len(samples), samples_in_shard)):
        group, bodies = samples[begin : begin + samples_in_shard], []
        for sample in group:
            columns = [sample["domain"].encode(), array(sample["indices"]), sample["input_ids"].tobytes()]
            bodies.append(b"".join(numpy.uint32(len(column)).tobytes() for column in columns) + b"".join(columns))
        header = json.dumps({"format": "mds"}).encode()
        start = 4 * (len(group) + 2) + len(header)
        offsets = numpy.cumsum([start, *map(len, bodies)]).astype(numpy.uint32)
        data = numpy.uint32(len(group)).tobytes() + offsets.tobytes() + header + b"".join(bodies)
        name = f"shard.{number:05d}.mds"
        zipped = None
        if packed:
            zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
            (folder / f"{name}.zstd").write_bytes(zstandard.ZstdCompressor().compress(data))
            zipped = {"basename": f"{name}.zstd", "bytes": 0, "hashes": {}}
        else:
            (folder / name).write_bytes(data)
        shards.append(
            {
                "format": "mds", "version": 2, "samples": len(group), "compression": "zstd" if packed else None,
                "column_names": ["domain", "indices", "input_ids"],
                "column_encodings": ["str", "ndarray", "ndarray:uint32:12"],
                "column_sizes": [None, None, None], "hashes": [], "size_limit": 1 << 26,
                "raw_data": {"basename": name, "bytes": len(data), "hashes": {}}, "zip_data": zipped,
            }
        )  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    return folder


def prolong_samples() -> list[dict]:
    texts = [["ab", "a longer"], ["whole sample"], ["four", "four", "4444"]]
    samples = []
    for number, parts in enumerate(texts):
        content = numpy.frombuffer("".join(parts).ljust(12, "~").encode(), numpy.uint8).astype(numpy.uint32)
        ends = numpy.cumsum([len(part) for part in parts])
        bounds = numpy.stack([numpy.r_[0, ends[:-1]], ends], axis=1).astype(numpy.int64)
        samples.append({"domain": f"d{number}", "indices": bounds, "input_ids": content})
    return samples


@pytest.mark.parametrize("packed", [False, True])
def test_prolong_is_decoded_and_tokenised_anew(tmp_path, packed):
    source = Source(name="prolong", path=str(write_mds(tmp_path / "book-65536", prolong_samples(), packed=packed)))
    assert documents.form_of(source) == "prolong"
    read = tokenise_source(source, tmp_path / "tokens", ByteTokenizer(), ByteTokenizer())
    expected = ["ab", "a longer", "whole sample", "four", "four", "4444"]
    assert read.tokens.tolist() == [token for text in expected for token in [*text.encode(), END]]
    assert read.lengths.tolist() == [len(text) + 1 for text in expected]
    assert [number for number, _ in read_samples(tmp_path / "book-65536", 1)] == [1, 2]


def test_a_broken_shard_raises(tmp_path):
    folder = write_mds(tmp_path / "book", prolong_samples())
    shard = folder / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match="a shard must be of 2 samples and whole"):
        list(read_samples(folder))


def test_pickled_columns_are_not_read(tmp_path):
    folder = write_mds(tmp_path / "book", prolong_samples())
    index = folder / "index.json"
    index.write_text(index.read_text().replace('"str"', '"pkl"'))
    with pytest.raises(ValueError, match="encoding of the column domain must be .*, got pkl"):
        list(read_samples(folder))


def test_no_document_in_both_parts_and_none_lost(tmp_path):
    generator = numpy.random.default_rng(0)
    texts = {f"{number:03d}.txt": f"text {generator.integers(80)} " * 3 for number in range(200)}
    ours = Source(name="ours", path=str(write_texts(tmp_path / "ours", texts)))
    theirs = Source(
        name="theirs", path=str(write_texts(tmp_path / "theirs", {"x.txt": texts["000.txt"], "y.txt": "own " * 9})),
        held_out=True,
    )  # fmt: skip
    settings = settings_for(tmp_path, ours, theirs, held_out_share=0.3)
    sentence = prepare_data(settings, ByteTokenizer())
    train, held_out = prepared(settings, "train", "ours"), prepared(settings, "held_out", "ours")
    other = prepared(settings, "held_out", "theirs")
    assert len(train) > 50
    assert len(held_out) > 20
    assert not {*map(tuple, train)} & {*map(tuple, held_out + other)}
    copies = list(texts.values()).count(texts["000.txt"])
    repeated = [list(texts["000.txt"].encode()) + [END]] * copies
    if repeated[0] not in held_out:
        assert f"{copies * len(repeated[0])} repeated" in sentence
        held_out = held_out + repeated
    assert sorted(train + held_out) == sorted(by_definition(list(texts.values())))
    assert not (settings.data_folder / "theirs_train.bin").exists()


def test_max_tokens_takes_the_longest(tmp_path):
    texts = {f"{length}.txt": "x" * length for length in (5, 50, 20, 40, 10)}
    source = Source(name="few", path=str(write_texts(tmp_path / "in", texts)), max_tokens=80)
    settings = settings_for(tmp_path, source)
    assert "92 tokens to train on, 0 held out, 38 beyond max tokens" in prepare_data(settings, ByteTokenizer())
    assert [len(document) for document in prepared(settings, "train", "few")] == [51, 41]


@pytest.mark.parametrize("line", ["word and word\n", "word\r\n", "  indented\nmore\n\nword\n"])
def test_long_texts_are_cut_where_nothing_changes(line):
    text = line * (3 * BLOCK_CHARS // len(line))
    parts = list(cut_text([text[:1000], text[1000:]]))
    assert "".join(parts) == text
    assert len(parts) > 2
    assert all(part[-1] == "\n" and not after[0].isspace() for part, after in zip(parts, parts[1:], strict=False))


def test_cuts_leave_the_tokens_of_a_real_tokenizer(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from examples.extend_context.tokenizer import HuggingFaceTokenizer
    from tests.project.extend_models import save_tokenizer

    save_tokenizer(tmp_path)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    text = (Path(__file__).parents[2] / "README.md").read_text() * 10 + "<|end|>"
    [whole] = tokenizer.encode([text])
    parts = tokenizer.encode(list(cut_text([text])))
    assert len(parts) > 1
    assert [token for part in parts for token in part] == whole
    assert tokenizer.end_of_document not in whole
    assert tokenizer.decode(whole) == text


@pytest.mark.parametrize("form", ["text", "jsonl", "prolong"])
def test_a_stopped_run_continues(tmp_path, monkeypatch, form):
    """Stop before every batch in turn: the files end up the same, and what is finished is not tokenised again."""
    if form == "text":
        source = Source(name="s", path=str(write_texts(tmp_path / "in", TEXTS)), join="folder")
    elif form == "jsonl":
        source = Source(name="s", path=str(write_jsonl(tmp_path / "records.jsonl")), text="body", join="field:repo")
    else:
        source = Source(name="s", path=str(write_mds(tmp_path / "book", prolong_samples())))
    monkeypatch.setattr(tokens, "_BATCH_CHARS", 1)  # a batch for each text
    whole = tokenise_source(source, tmp_path / "whole", ByteTokenizer(), ByteTokenizer())

    class Stops(ByteTokenizer):
        def encode(self, texts):
            if self.calls == run:
                raise Interrupted
            return super().encode(texts)

    for run in range(20):  # noqa: B007 (the runs get longer)
        try:
            tokenise_source(source, tmp_path / "part", Stops(), ByteTokenizer(), seconds_between_states=0.0)
        except Interrupted:
            continue
        break
    assert run > 0
    for name in ("tokens", "lengths", "hashes"):
        assert (tmp_path / f"part/{name}.bin").read_bytes() == (tmp_path / f"whole/{name}.bin").read_bytes()
    finished = ByteTokenizer()
    assert tokenise_source(source, tmp_path / "part", finished, ByteTokenizer()).chars == whole.chars
    assert finished.calls == 0


def test_another_tokenizer_begins_anew(tmp_path):
    source = Source(name="s", path=str(write_texts(tmp_path / "in", TEXTS)))
    tokenise_source(source, tmp_path / "t", ByteTokenizer())
    other = ByteTokenizer()
    other.identity = "other bytes"
    tokenise_source(source, tmp_path / "t", other)
    assert other.calls


def test_prepared_data_are_not_written_again(tmp_path):
    source = Source(name="s", path=str(write_texts(tmp_path / "in", TEXTS)))
    settings = settings_for(tmp_path, source)
    prepare_data(settings, ByteTokenizer())
    before = (settings.data_folder / "s_train.bin").stat().st_mtime_ns
    prepare_data(settings, ByteTokenizer())
    assert (settings.data_folder / "s_train.bin").stat().st_mtime_ns == before


def test_empty_text_raises(tmp_path):
    source = Source(name="s", path=str(write_texts(tmp_path / "in", {"a.txt": "", "b.txt": ""})))
    with pytest.raises(ValueError, match="path of s must be of text, got 2 empty documents"):
        prepare_data(settings_for(tmp_path, source), ByteTokenizer())


def test_a_sequence_longer_than_every_document_raises(tmp_path):
    source = Source(name="s", path=str(write_texts(tmp_path / "in", {"a.txt": "x" * 100})))
    with pytest.raises(ValueError, match=r"train.seq_length must be below the 101 tokens .* got 101\. Join short"):
        prepare_data(settings_for(tmp_path, source, seq_length=101), ByteTokenizer())


@pytest.mark.parametrize("num_tokens", [512, 940])
def test_a_tokenizer_of_another_vocabulary_raises(num_tokens):
    with pytest.raises(ValueError, match="the tokenizer must be of the model's vocabulary, "):
        check_vocabulary(num_tokens, 500 if num_tokens == 512 else 1000, "folder")
    check_vocabulary(151665, 151936, "Qwen2.5, whose embedding has rows for padding")


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        ('{"other": 1}', {}, "text of s must be the field of a record that holds text"),
        ("{broken", {}, "a line of s must be JSON"),
        ("[1]", {}, "a line of s must be a JSON object"),
        ('{"text": "t"}', {"join": "field:repo"}, "join of s must be a field of every record"),
        ('{"text": "t"}', {"join": "folder"}, "join of s must be one of all, field:NAME for jsonl, got 'folder'"),
        ('{"text": "t"}', {"form": "prolong"}, "tokenizer of s must be the tokenizer that the shards were made with"),
        ('{"text": "t"}', {"path": "nowhere"}, "path of s must be a file or a folder, got nowhere"),
    ],
)
def test_bad_input_raises(tmp_path, content, changes, message):
    path = tmp_path / "s.jsonl"
    path.write_text(content + "\n")
    with pytest.raises(ValueError, match=message):
        list(read_documents(Source(**({"name": "s", "path": str(path)} | changes))))


def test_a_full_disk_ends_with_a_sentence_and_then_continues(tmp_path, capsys, monkeypatch):
    text = "word " * 20000
    write_texts(tmp_path / "in", {"a.txt": text})
    config = tmp_path / "extend.yaml"
    config.write_text(
        f"output: {tmp_path / 'out'}\nmodel: {{source: none, length: 1024}}\n"
        f"data: {{sources: [{{name: s, path: {tmp_path / 'in'}}}]}}\n"
        "train: {megatron_lm: none, seq_length: 16, steps: 1}\n"
    )
    monkeypatch.setattr("examples.extend_context.prepare_data.HuggingFaceTokenizer", lambda _: ByteTokenizer())
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50000, before[1]))
    try:
        status = main(["prepare_data", "--config", str(config)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert status == 2
    assert "prepare_data: the disk must have room, got File too large" in capsys.readouterr().err
    assert main(["prepare_data", "--config", str(config)]) == 0
    assert "prepare_data: data in" in capsys.readouterr().out
