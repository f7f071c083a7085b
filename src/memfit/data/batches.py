"""Global batches of a training job as a deterministic, resumable, endless stream in bounded memory.

The text is turned into token numbers once and kept in a cache file (``store``); batches are read from there
in an order that is computed, not stored (``permute``). In memory are one batch, and while the cache is
written one group of documents.

What a batch holds (all int64 on the CPU; R rows, L tokens):

- causal-lm: ``input_ids`` and ``labels`` (R, L), equal, since Hugging Face models shift inside. Documents are
  joined by an end token and cut into blocks of ``task.sequence_length``; items = R · (L - 1). The last block
  of an epoch is filled up with end tokens whose labels are -100 and do not count.
- masked-lm: the same blocks; of 15 % of the tokens 80 % are hidden, 10 % replaced by a random one, 10 % left;
  ``labels`` are -100 elsewhere; items = labelled tokens.
- sequence-classification: ``input_ids`` and ``attention_mask`` (R, L), ``labels`` (R,); items = R. L is
  ``task.sequence_length`` in every batch where the job gives one, so that each step needs what was
  predicted; else the longest row of the batch, at most 512. Longer rows are cut.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memfit.core.errors import BadInput
from memfit.core.job import Job
from memfit.core.step import Batch
from memfit.core.words import say
from memfit.data.formats import Document
from memfit.data.permute import Permutation
from memfit.data.sources import Source, open_source
from memfit.data.store import TokenStore, TokenWriter, atomic_file
from memfit.data.tokenize import TextTokenizer, open_tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

TextHead = Literal["causal-lm", "masked-lm", "sequence-classification"]
HEADS: tuple[TextHead, ...] = ("causal-lm", "masked-lm", "sequence-classification")
LONGEST_ROW = 512
MASKED_SHARE = 0.15
_GROUP_CHARACTERS = 1 << 20
_GROUP_DOCUMENTS = 4096
_IGNORE = -100
_log = logging.getLogger("memfit.data")


class TrainingStream:
    """Endless windows of ``task.global_batch`` rows; every row comes once in an epoch.

    A window may begin in one epoch and end in the next. Two streams of the same job and data give the same
    windows; :meth:`state` and :meth:`restore` carry on exactly.

    Attributes:
        vocabulary_size: of the tokenizer.
        description: source, documents, tokens and rows in words.
        head: which kind of batch.
        rows: rows in an epoch; tokens, documents: in the data.
        class_names: of a classification, in the order of their numbers.
        tokenizer: that made the tokens.
    """

    def __init__(
        self, job: Job, head: TextHead, source: Source, tokenizer: TextTokenizer, store: TokenStore
    ) -> None:
        facts = store.facts
        self.head = head
        self.tokenizer = tokenizer
        self.vocabulary_size = tokenizer.vocabulary_size
        self.tokens: int = facts["tokens"]
        self.documents: int = facts["documents"]
        self.class_names: tuple[str, ...] = ()
        self._store = store
        self._global_batch = job.task.global_batch
        self._length = job.task.sequence_length
        self._shuffle = job.data.shuffle
        self._seed = job.data.seed
        self._key = f"{facts['key']}-{head}-{self._length}-{'shuffled' if self._shuffle else 'in order'}"
        self._position = 0
        if head == "sequence-classification":
            self.rows: int = facts["rows"]
            self.class_names, self._numbers = _classes(facts["classes"], job, source)
        else:
            assert self._length is not None
            self.rows = -(-self.tokens // self._length)
        figures = {
            "source": source.name,
            "tokens": self.tokens,
            "rows": self.rows,
            "length": self.largest_shape()[1],
        }
        self.description = say(
            "data.description", documents=self.documents, tokenizer=tokenizer.description, **figures
        )
        if self.rows < self._global_batch:
            raise BadInput("data.too_small", setting="task.global_batch", value=self._global_batch, **figures)

    def largest_shape(self) -> tuple[int, int]:
        """(rows, tokens per row) of the largest window that can come: what a prediction must provide for."""
        length = self._length or int(self._store.facts["longest_row"])
        return self._global_batch, length

    def next_window(self) -> Batch:
        """The next global batch."""
        import numpy as np

        first = self._position
        indices = self._rows_at(np.arange(first, first + self._global_batch, dtype=np.int64))
        self._position += self._global_batch
        if self.head == "sequence-classification":
            return self._classified(indices)
        blocks, real = self._blocks(indices)
        return self._causal(blocks, real) if self.head == "causal-lm" else self._masked(blocks, real, first)

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` needs: epoch, position in it (rows), seed, and the data's key. JSON-able."""
        epoch, position = divmod(self._position, self.rows)
        return {"epoch": epoch, "position": position, "seed": self._seed, "key": self._key}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken.

        Raises:
            BadInput: it belongs to other data, another tokenizer or another seed.
        """
        for name, mine in (("key", self._key), ("seed", self._seed)):
            if state.get(name) != mine:
                raise BadInput(
                    "data.other_state", setting=f"state.{name}", value=state.get(name), expected=mine
                )
        self._position = state["epoch"] * self.rows + state["position"]

    def _rows_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows at positions of the endless stream, each epoch in an order of its own."""
        import numpy as np

        epochs, indices = np.divmod(positions, self.rows)
        if self._shuffle:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                indices[here] = Permutation(self.rows, f"{self._seed}:{epoch}")(indices[here])
        return indices

    def _blocks(self, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """(R, L) token numbers and which of them are the data's own."""
        import numpy as np

        assert self._length is not None
        blocks = np.full((len(indices), self._length), self.tokenizer.end, dtype=np.int64)
        real = np.zeros(blocks.shape, dtype=np.bool_)
        for row, index in enumerate(indices):
            start = int(index) * self._length
            tokens = self._store.tokens(start, min(start + self._length, self.tokens))
            blocks[row, : len(tokens)] = tokens
            real[row, : len(tokens)] = True
        return blocks, real

    def _causal(self, blocks: npt.NDArray[np.int64], real: npt.NDArray[np.bool_]) -> Batch:
        import torch

        labels = blocks.copy()
        labels[~real] = _IGNORE
        data = {"input_ids": torch.from_numpy(blocks), "labels": torch.from_numpy(labels)}
        return Batch(data, rows=len(blocks), items=int(real[:, 1:].sum()))

    def _masked(self, blocks: npt.NDArray[np.int64], real: npt.NDArray[np.bool_], position: int) -> Batch:
        import numpy as np
        import torch

        assert self.tokenizer.mask is not None
        # Drawn from the position, so that a resumed run hides the same tokens.
        digest = hashlib.blake2b(f"mask:{self._seed}:{position}".encode(), digest_size=16).digest()
        random = np.random.default_rng(int.from_bytes(digest, "little"))
        open_to = real & ~np.isin(blocks, list(self.tokenizer.special))
        chosen = open_to & (random.random(blocks.shape) < MASKED_SHARE)
        if not chosen.any() and open_to.any():
            chosen.flat[np.flatnonzero(open_to)[0]] = True
        fate = random.random(blocks.shape)
        replacement = random.integers(0, self.vocabulary_size, blocks.shape)
        hidden = np.where(chosen & (fate < 0.8), self.tokenizer.mask, blocks)
        hidden = np.where(chosen & (fate >= 0.9), replacement, hidden)
        labels = np.where(chosen, blocks, _IGNORE)
        data = {"input_ids": torch.from_numpy(hidden), "labels": torch.from_numpy(labels)}
        return Batch(data, rows=len(blocks), items=int(chosen.sum()))

    def _classified(self, indices: npt.NDArray[np.int64]) -> Batch:
        import numpy as np
        import torch

        rows = [self._store.row(int(index)) for index in indices]
        length = self._length or max(len(tokens) for tokens, _ in rows)
        ids = np.full((len(rows), length), self.tokenizer.pad, dtype=np.int64)
        mask = np.zeros_like(ids)
        for number, (tokens, _) in enumerate(rows):
            ids[number, : len(tokens)] = tokens
            mask[number, : len(tokens)] = 1
        labels = np.array([self._numbers[found] for _, found in rows], dtype=np.int64)
        data = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask),
                "labels": torch.from_numpy(labels)}  # fmt: skip
        return Batch(data, rows=len(rows), items=len(rows))


def open_stream(
    job: Job, folder: Path | None = None, *, vocabulary: int | None, tokenizer_hint: str | None
) -> TrainingStream:
    """The training stream of a job; the first call on new data writes its tokens to the cache.

    Args:
        folder: where tokenizers and tokens are kept; ``None``: the user's cache folder.
        vocabulary: of the model; the tokenizer may not have more tokens.
        tokenizer_hint: the model's own folder, ``package:`` reference or GGUF file, if it has one.

    Raises:
        BadInput: anything about the data that cannot be used, named with its place and the valid choices.
        MissingExtra: a library that the format or tokenizer needs is not installed.
        RunFailed: the disk is full.
    """
    head = head_of(job)
    labelled = head == "sequence-classification"
    if not labelled and job.task.sequence_length is None:
        raise BadInput("input.required", setting="task.sequence_length")
    if job.task.sequence_length is not None and job.task.sequence_length < 2:
        raise BadInput("data.length", setting="task.sequence_length", value=job.task.sequence_length)
    root = folder if folder is not None else cache_folder()
    source = open_source(job.data, labelled)
    tokenizer = open_tokenizer(source, root, hint=tokenizer_hint, limit=vocabulary)
    if head == "masked-lm" and tokenizer.mask is None:
        raise BadInput("data.no_mask", setting="model.head", value=tokenizer.description)
    longest = (job.task.sequence_length or LONGEST_ROW) if labelled else None
    recipe = f"tokens-1:{source.fingerprint}:{tokenizer.key}:{longest}"
    key = hashlib.blake2b(recipe.encode(), digest_size=16).hexdigest()
    path = root / "tokens" / f"{key}.tokens"
    if not path.is_file():
        _write(path, key, source, tokenizer, longest)
    return TrainingStream(job, head, source, tokenizer, TokenStore(path))


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/memfit``, by default ``~/.cache/memfit``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "memfit"


def head_of(job: Job) -> TextHead:
    """The job's head, or where it names none: classification for labelled data, else causal-lm."""
    if job.model.head is None:
        labelled = bool(job.data.classes) or job.task.labels is not None
        return "sequence-classification" if labelled else "causal-lm"
    for head in HEADS:
        if head == job.model.head:
            return head
    raise BadInput("data.head", setting="model.head", value=job.model.head, choices=", ".join(HEADS))


def _write(path: Path, key: str, source: Source, tokenizer: TextTokenizer, longest: int | None) -> None:
    """Tokens of the whole source into the cache, a group of documents at a time."""
    _log.info(say("data.tokenizing", source=source.name, path=str(path)))
    classes: dict[str, int] = {}
    documents = 0
    with atomic_file(path) as file:
        writer = TokenWriter(file, path.parent, tokenizer.vocabulary_size)
        try:
            for group in _groups(source.documents()):
                encoded = tokenizer.encode([d.text for d in group], frame=source.labelled, longest=longest)
                for document, ids in zip(group, encoded, strict=True):
                    if source.labelled:
                        assert document.label is not None
                        writer.append_row(
                            ids or [tokenizer.end], classes.setdefault(document.label, len(classes))
                        )
                    else:
                        writer.append(ids, tokenizer.end if document.ends else None)
                    documents += document.ends
            writer.finish({"key": key, "documents": documents, "classes": list(classes)})
        finally:
            writer.close()


def _groups(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Groups of about 1 MiB of text, so that the tokenizer's threads have work and memory stays bounded."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= _GROUP_CHARACTERS or len(group) >= _GROUP_DOCUMENTS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _classes(found: list[str], job: Job, source: Source) -> tuple[tuple[str, ...], list[int]]:
    """The classes' names in order, and the number of each as found: numbers stand for themselves, names
    declared in ``data.classes`` keep that order, other names are sorted."""
    if all(name.isdecimal() for name in found):
        count = max(int(name) for name in found) + 1
        names = [str(number) for number in range(max(count, job.task.labels or 0))]
    else:
        names = [n for n in source.data.classes if n in found] or sorted(found)
    labels = job.task.labels or len(names)
    if len(names) > labels:
        raise BadInput("data.classes_many", setting="task.labels", value=labels, found=len(names),
                       choices=", ".join(names[:20]))  # fmt: skip
    if labels < 2:
        raise BadInput("data.classes_few", setting="task.labels", value=labels, choices=", ".join(names))
    return tuple(names), [names.index(str(int(n)) if n.isdecimal() else n) for n in found]
