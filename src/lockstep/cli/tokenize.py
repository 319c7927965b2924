"""`lockstep tokenize`."""

from dataclasses import dataclass
from pathlib import Path

from lockstep.bar import Bar
from lockstep.cli.parsing import parse
from lockstep.data.tokens import BYTES, write_tokens
from lockstep.errors import UserError


@dataclass
class TokenizeArguments:
    """Make a folder of token ids from text, for --data.name tokens: lockstep tokenize FILES-OR-FOLDERS --out FOLDER.

    Files are read in the order of their names, a piece at a time; the folder is mapped into memory in training, so the
    text may be larger than that.

    For example:

    lockstep tokenize books/ --out data/books

    lockstep tokenize books/ --out data/books --tokenizer tokenizer.json

    lockstep train configs/gpt_text.yaml --data.name tokens --data.path data/books --nproc 2
    """

    out: str = ""
    """The folder to make."""
    tokenizer: str = BYTES
    """bytes (256 tokens), or a tokenizer.json of the tokenizers package."""
    test_share: float = 0.1
    """Of the tokens, from the end: what training does not see."""


def main(argv: list[str]) -> int:
    count = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    given = [Path(word) for word in argv[:count]]
    arguments = parse(TokenizeArguments, argv[count:], "tokenize FILES")
    if not given or not arguments.out:
        raise UserError("lockstep tokenize needs text and a folder to make: lockstep tokenize books/ --out data/books")
    if not 0 < arguments.test_share < 1:
        raise UserError(f"--test-share is {arguments.test_share:g}, but it must be between 0 and 1")
    files = files_of(given)
    total = sum(file.stat().st_size for file in files)
    with Bar() as progress:
        task = progress.add_task("tokenizing", total=total)
        advance = lambda read: progress.advance(task, read)  # noqa: E731
        about = write_tokens(files, Path(arguments.out), arguments.tokenizer, arguments.test_share, advance)
    print(
        f"{about.count:,} tokens ({about.dtype}, vocabulary {about.vocabulary:,}) of {total / 1e6:,.1f} MB in "
        f"{len(files):,} files, in {arguments.out}/; train with --data.name tokens --data.path {arguments.out}"
    )
    return 0


def files_of(given: list[Path]) -> list[Path]:
    """Those named, and those in folders that are named, in the order of their names."""
    found: list[Path] = []
    for path in given:
        if path.is_dir():
            found += sorted(file for file in path.rglob("*") if file.is_file())
        elif path.is_file():
            found.append(path)
        else:
            raise UserError(f"{path} does not exist; give files of text, or folders of them")
    if not found:
        raise UserError(f"{', '.join(map(str, given))} has no files in it")
    return found
