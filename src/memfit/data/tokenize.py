"""Text to token numbers: a tokenizer that is there (file, folder, package, GGUF), or one trained on the spot.

Nothing is downloaded: tokenizers are read from local files only, and no code that comes with them is run.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit.core.errors import BadInput, MissingExtra
from memfit.data.sources import Source, resolve
from memfit.data.store import atomic_file

DEFAULT_VOCABULARY = 8192
SAMPLE_CHARACTERS = 16 << 20
_SAMPLE_OF_ONE_DOCUMENT = 1 << 16
_END, _PAD, _MASK = "<|end|>", "<|pad|>", "<|mask|>"
_ALPHABET = 256
# Names under which a bare tokenizer.json may keep its special tokens, the likeliest first.
_END_NAMES = (_END, "<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]")
_PAD_NAMES = (_PAD, "<pad>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>")
_MASK_NAMES = (_MASK, "[MASK]", "<mask>")
_FOLDER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
)


class TextTokenizer(ABC):
    """A tokenizer as the batches need it.

    Attributes:
        vocabulary_size: one more than the largest token number.
        end: the number that closes a document; pad: that fills rows; mask: that hides a token, if there is
        one. special: numbers that masking leaves alone.
        key: a hash of what the tokenizer does.
        description: where it comes from.
    """

    vocabulary_size: int
    end: int
    pad: int
    mask: int | None
    special: frozenset[int]
    key: str
    description: str

    @abstractmethod
    def encode(self, texts: list[str], *, frame: bool, longest: int | None = None) -> list[list[int]]:
        """Token numbers of each text; ``frame`` adds the tokens that open and close a row, ``longest`` cuts
        rows (frame included)."""


class _FileTokenizer(TextTokenizer):
    """A ``tokenizer.json`` without the settings around it."""

    def __init__(self, path: Path, setting: str) -> None:
        tokenizers = _import_tokenizers()
        text = path.read_text(encoding="utf-8")
        try:
            self._inner = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise BadInput("data.no_tokenizer", setting=setting, value=str(path), reason=str(error)) from None
        self._inner.no_padding()
        self._inner.no_truncation()
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        self.vocabulary_size = max(vocabulary.values()) + 1
        end = _first(vocabulary, _END_NAMES)
        if end is None:
            raise BadInput(
                "data.no_end_token", setting=setting, value=str(path), choices=", ".join(_END_NAMES)
            )
        pad = _first(vocabulary, _PAD_NAMES)
        self.end, self.pad, self.mask = end, end if pad is None else pad, _first(vocabulary, _MASK_NAMES)
        added = self._inner.get_added_tokens_decoder()
        self.special = frozenset(number for number, token in added.items() if token.special)
        self.key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self.description = str(path)

    def encode(self, texts: list[str], *, frame: bool, longest: int | None = None) -> list[list[int]]:
        if longest is None:
            self._inner.no_truncation()
        else:
            self._inner.enable_truncation(longest)
        return [e.ids for e in self._inner.encode_batch_fast(texts, add_special_tokens=frame)]


class _ModelTokenizer(TextTokenizer):
    """The tokenizer of a model folder or GGUF file, with the model's own settings."""

    def __init__(self, path: Path, setting: str) -> None:
        transformers = _import_transformers()
        arguments: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        folder = path
        if path.is_file():
            _need_gguf()
            folder, arguments["gguf_file"] = path.parent, path.name
        try:
            self._inner = transformers.AutoTokenizer.from_pretrained(str(folder), **arguments)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = str(error).split("\n")[0]
            raise BadInput("data.no_tokenizer", setting=setting, value=str(path), reason=reason) from None
        inner = self._inner
        self.vocabulary_size = max(inner.get_vocab().values()) + 1
        end = inner.eos_token_id if inner.eos_token_id is not None else inner.sep_token_id
        if end is None:
            raise BadInput(
                "data.no_end_token", setting=setting, value=str(path), choices="eos_token, sep_token"
            )
        self.end, self.mask = end, inner.mask_token_id
        self.pad = end if inner.pad_token_id is None else inner.pad_token_id
        self.special = frozenset(inner.all_special_ids)
        self.key = self._hash()
        self.description = str(path)

    def _hash(self) -> str:
        backend = getattr(self._inner, "backend_tokenizer", None)
        state = backend.to_str() if backend is not None else sorted(self._inner.get_vocab().items())
        text = json.dumps([state, type(self._inner).__name__, self.end, self.pad, self.mask])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def encode(self, texts: list[str], *, frame: bool, longest: int | None = None) -> list[list[int]]:
        encoded = self._inner(
            texts,
            add_special_tokens=frame,
            truncation=longest is not None,
            max_length=longest,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return encoded["input_ids"]


def open_tokenizer(source: Source, folder: Path, *, hint: str | None, limit: int | None) -> TextTokenizer:
    """The tokenizer of a job.

    It is ``data.tokenizer``, else the model's own (``hint``: a folder, ``package:`` reference or GGUF file
    that holds one), else a byte-level BPE trained on a bounded sample and kept in ``folder``.
    ``data.vocabulary`` asks for a trained one of that size.

    Args:
        limit: the model's vocabulary: no token number may reach it. ``None``: no limit.

    Raises:
        BadInput: no tokenizer at that place, more tokens than the model has, too small a vocabulary.
        MissingExtra: the library that reads it is not installed.
    """
    data = source.data
    if data.tokenizer is not None and data.vocabulary is not None:
        raise BadInput("data.vocabulary_and_tokenizer", setting="data.vocabulary", value=data.vocabulary)
    if data.tokenizer is not None:
        found = _existing(resolve(data.tokenizer, "data.tokenizer"), "data.tokenizer")
        if found is None:
            raise BadInput("data.no_tokenizer_files", setting="data.tokenizer", value=data.tokenizer,
                           choices=", ".join((*_FOLDER_FILES, "*.gguf")))  # fmt: skip
        return _within(found, limit, "data.tokenizer")
    if data.vocabulary is None and hint is not None:
        place = resolve(hint, "model.name") if hint.startswith("package:") else Path(hint).expanduser()
        found = _existing(place, "model.name") if place.exists() else None
        if found is not None:
            return _within(found, limit, "model.name")
    size = data.vocabulary or min(DEFAULT_VOCABULARY, limit or DEFAULT_VOCABULARY)
    if size < _ALPHABET + 3:
        raise BadInput("data.vocabulary_small", setting="data.vocabulary", value=size, least=_ALPHABET + 3)
    if limit is not None and size > limit:
        raise BadInput("data.vocabulary_large", setting="data.vocabulary", value=size, limit=limit)
    return _trained(source, folder, size)


def _existing(path: Path, setting: str) -> TextTokenizer | None:
    if path.is_file() and path.suffix == ".json":
        return _FileTokenizer(path, setting)
    if path.is_file() and path.suffix == ".gguf":
        return _ModelTokenizer(path, setting)
    if path.is_dir() and any((path / name).is_file() for name in _FOLDER_FILES):
        return _ModelTokenizer(path, setting)
    return None


def _within(tokenizer: TextTokenizer, limit: int | None, setting: str) -> TextTokenizer:
    if limit is not None and tokenizer.vocabulary_size > limit:
        raise BadInput("data.vocabulary_large", setting=setting, value=tokenizer.vocabulary_size, limit=limit)
    return tokenizer


def _trained(source: Source, folder: Path, size: int) -> TextTokenizer:
    recipe = f"bpe-1:{size}:{SAMPLE_CHARACTERS}:{source.fingerprint}"
    path = folder / "tokenizers" / f"{hashlib.blake2b(recipe.encode(), digest_size=16).hexdigest()}.json"
    if not path.is_file():
        text = _train(_sample(source), size)
        with atomic_file(path) as file:
            file.write(text.encode())
    tokenizer = _FileTokenizer(path, "data.vocabulary")
    tokenizer.description = f"BPE {tokenizer.vocabulary_size}"
    return tokenizer


def _train(sample: Iterator[str], size: int) -> str:
    """A byte-level BPE of at most ``size`` tokens as the text of a ``tokenizer.json``: end 0, pad 1, mask 2.

    Counts of words, not the sample, are what training holds; ties are broken by token number, so equal
    samples give equal tokenizers.
    """
    tokenizers = _import_tokenizers()
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[_END, _PAD, _MASK],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(sample, trainer)
    return bpe.to_str()


def _sample(source: Source) -> Iterator[str]:
    """The beginnings of documents, up to ``SAMPLE_CHARACTERS`` in all."""
    left = SAMPLE_CHARACTERS
    begins = True
    for document in source.documents():
        if begins:
            text = document.text[: min(_SAMPLE_OF_ONE_DOCUMENT, left)]
            left -= len(text)
            yield text
            if left <= 0:
                return
        begins = document.ends


def _first(vocabulary: dict[str, int], names: tuple[str, ...]) -> int | None:
    return next((vocabulary[name] for name in names if name in vocabulary), None)


def _import_tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise MissingExtra("tokenizers", "hf") from None
    return tokenizers


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "hf") from None
    return transformers


def _need_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise MissingExtra("gguf", "examples") from None
