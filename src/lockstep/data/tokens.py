"""Token ids in a file that is mapped into memory, not read into it: text of any size, packed into contexts.

A folder, which `lockstep tokenize` makes:

    tokens.bin      the ids, one after the other: uint8, uint16 or uint32, little-endian
    tokens.json     how many, of which dtype, how large the vocabulary is, and which tokenizer made them
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.batch import Batch
from lockstep.data.dataset import DataSet, DataSpec
from lockstep.errors import UserError
from lockstep.results.whole import made_whole
from lockstep.strange import json_of

IDS, ABOUT = "tokens.bin", "tokens.json"
BYTES = "bytes"
PIECE = 1 << 22
"""Bytes of text that are read at once."""


@dataclass
class About:
    """What `tokens.json` says of a tokenized text."""

    count: int
    dtype: str
    vocabulary: int
    tokenizer: str
    test_share: float


@dataclass
class MappedTokens:
    """A split: sample i is the i-th window of `ids[first:last]`, its targets the same window one token on."""

    file: Path
    about: About
    first: int
    last: int
    context: int

    def __post_init__(self) -> None:
        self.ids = np.memmap(self.file, dtype=self.about.dtype, mode="r", shape=(self.about.count,))

    def __getstate__(self) -> dict[str, Any]:
        """To another process goes where it lies, not what is in it."""
        return {name: value for name, value in vars(self).items() if name != "ids"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

    def __len__(self) -> int:
        return max(0, (self.last - self.first - 1) // self.context)

    def batch(self, indices: Tensor) -> Batch:
        starts = [self.first + i * self.context for i in indices.tolist()]
        windows = np.stack([self.ids[s : s + self.context + 1] for s in starts]).astype(np.int64)
        tokens = torch.from_numpy(windows)
        if (largest := int(windows.max())) >= self.about.vocabulary:
            raise UserError(
                f"{self.file} has the token {largest}, and {ABOUT} a vocabulary of {self.about.vocabulary}; "
                f"make it again with lockstep tokenize"
            )
        return Batch(tokens[:, :-1], tokens[:, 1:])


def load_tokens(folder: Path, context: int) -> DataSet:
    about = read_about(folder)
    cut = int(about.count * (1 - about.test_share))
    spans = ((0, cut), (cut, about.count))
    train, test = (MappedTokens(folder / IDS, about, first, last, context) for first, last in spans)
    if min(len(train), len(test)) == 0:
        raise UserError(
            f"{folder} holds {about.count:,} tokens, of which {about.count - cut:,} are for testing: too few for a "
            f"model.context of {context}"
        )
    return DataSet(f"tokens {folder}", DataSpec("tokens", (context,), about.vocabulary), train, test)


def read_about(folder: Path) -> About:
    """Checked: it may come from a stranger."""
    try:
        about = About(**json_of(folder / ABOUT))
        check_about(about)
        size = np.dtype(about.dtype).itemsize
        found = (folder / IDS).stat().st_size
    except FileNotFoundError:
        raise UserError(f"{folder} has no {ABOUT}; make it with lockstep tokenize FILES --out {folder}") from None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder / ABOUT} cannot be read: {' '.join(str(error).split())[:200]}") from None
    if found != about.count * size or not found:
        raise UserError(
            f"{folder / IDS} is {found:,} bytes, and {ABOUT} speaks of {about.count:,} ids of {about.dtype}; "
            f"make it again with lockstep tokenize"
        )
    return about


def check_about(about: About) -> None:
    """ValueError where a value cannot be."""
    if about.dtype not in ("uint8", "uint16", "uint32"):
        raise ValueError(f"dtype is {about.dtype!r}, but it must be uint8, uint16 or uint32")
    for name in ("count", "vocabulary"):
        value = getattr(about, name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**48:
            raise ValueError(f"{name} is {str(value)[:40]!r}, but it must be a whole number above 0")
    share = about.test_share
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise ValueError(f"test_share is {str(share)[:40]!r}, but it must be between 0 and 1")


# ---- making one ----------------------------------------------------------------------------------------------------


def write_tokens(
    files: list[Path],
    folder: Path,
    tokenizer: str = BYTES,
    test_share: float = 0.1,
    advance: Callable[[int], None] = lambda _: None,
) -> About:
    """All of the files' text, in that order. Complete or not at all. `advance` is called with the bytes read."""
    encode, vocabulary = encoder(tokenizer)
    dtype = "uint8" if vocabulary <= 2**8 else "uint16" if vocabulary <= 2**16 else "uint32"
    count = 0
    with made_whole(folder) as part:
        with (part / IDS).open("wb") as out:
            for piece in pieces(files):
                ids = np.asarray(encode(piece), dtype=dtype)
                out.write(ids.tobytes())
                count += len(ids)
                advance(len(piece))
            out.flush()
            os.fsync(out.fileno())
        if not count:
            raise UserError(f"there is no text in {', '.join(str(file) for file in files[:3])}")
        about = About(count, dtype, vocabulary, tokenizer, test_share)
        (part / ABOUT).write_text(json.dumps(asdict(about), indent=1), encoding="utf-8")
    return about


def pieces(files: Iterable[Path]) -> Iterator[bytes]:
    """Of a file at a time, cut behind a line's end, so that no tokenizer sees half a word."""
    for file in files:
        with file.open("rb") as stream:
            left = b""
            while block := stream.read(PIECE):
                text = left + block
                end = text.rfind(b"\n") + 1 or len(text)
                yield text[:end]
                left = text[end:]
            if left:
                yield left


def encoder(tokenizer: str) -> tuple[Callable[[bytes], Any], int]:
    """From text to ids, and how many different ones there are."""
    if tokenizer == BYTES:
        return lambda text: np.frombuffer(text, dtype=np.uint8), 256
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError("--tokenizer FILE needs the tokenizers package: pip install tokenizers") from None
    try:
        found = Tokenizer.from_file(tokenizer)
    except Exception as error:  # the package raises its own, of no class that it names
        raise UserError(f"--tokenizer {tokenizer} cannot be read: {' '.join(str(error).split())[:200]}") from None
    return lambda text: found.encode(text.decode(errors="replace")).ids, found.get_vocab_size()
