"""The text: Python's own standard library, which every machine that can run this has.

A file is held out by its path alone, so that the choice does not depend on the other files.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Excluded: other people's packages, tests, and tables written by programs (code pages, the text of help()).
EXCLUDED_FOLDERS = (
    "site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload", "encodings", "pydoc_data",
)  # fmt: skip
# Differ from machine to machine: build settings.
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")
HELD_OUT_ONE_IN = 10
# Ends each file; source text does not contain it.
SEPARATOR = b"\0"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text as bytes: two 1-D uint8 tensors on the CPU.

    Attributes:
        training: What models are trained on.
        held_out: The text for validation. It shares no file with ``training``.
        training_files: Number of files.
        held_out_files: Number of files.
        root: Folder they were found in.
        digest: SHA-256 of both texts, in hexadecimal: equal if and only if the text is.
    """

    training: Tensor
    held_out: Tensor
    training_files: int
    held_out_files: int
    root: str
    digest: str


def source_files(root: Path) -> list[Path]:
    """The ``.py`` files below ``root`` that belong to the library itself, ordered by relative path."""
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if not set(EXCLUDED_FOLDERS).intersection(parts) and not any(
            part.startswith(EXCLUDED_PREFIXES) for part in parts
        ):
            found.append(path)
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def is_held_out(relative_path: str) -> bool:
    """Whether the file at this path (with forward slashes) is kept for validation: one in ten, by the path's hash."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def load_corpus(root: Path | None = None) -> Corpus:
    """Read the text below ``root``; by default the standard library of the running Python.

    Raises:
        FileNotFoundError: There are too few source files to train on some and keep others.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    training: list[bytes] = []
    held_out: list[bytes] = []
    for path in source_files(root):
        kept = held_out if is_held_out(path.relative_to(root).as_posix()) else training
        kept.append(path.read_bytes() + SEPARATOR)
    if not training or not held_out:
        raise FileNotFoundError(
            f"{root}: found {len(training)} source files to train on and {len(held_out)} to validate on; both are needed."
            " Some systems ship Python without its standard library's source."
        )
    texts = [b"".join(training), b"".join(held_out)]
    ours, theirs = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts)
    digest = hashlib.sha256(b"".join(texts)).hexdigest()
    return Corpus(ours, theirs, len(training), len(held_out), root=str(root), digest=digest)


class Batches:
    """Random windows of a text, determined by the seed.

    Args:
        text: 1-D uint8.
        batch: Windows at a time.
        context: Bytes that a model sees. A window has one byte more, the last to predict.
        seed: The seed of the windows' places.
    """

    def __init__(self, text: Tensor, *, batch: int, context: int, seed: int) -> None:
        self._text, self._batch, self._context = text, batch, context
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> Tensor:
        """The next windows: int64, (batch, context + 1)."""
        starts = torch.randint(len(self._text) - self._context, (self._batch,), generator=self._generator)
        return _windows(self._text, starts, self._context + 1)


def even_windows(text: Tensor, *, count: int, context: int) -> Tensor:
    """Windows spread evenly over the whole text, int64, (at most ``count``, context + 1); fewer if they would overlap."""
    length = context + 1
    count = max(1, min(count, len(text) // length))
    # In whole numbers: a float32 linspace would misplace the end of a long text.
    room = len(text) - length
    starts = torch.tensor([room * i // max(1, count - 1) for i in range(count)])
    return _windows(text, starts, length)


def _windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    return text[starts[:, None] + torch.arange(length)].long()
