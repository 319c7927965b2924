"""The configs that come with the package: found by their names from any folder. Nothing here needs torch."""

from difflib import get_close_matches
from pathlib import Path

from lockstep.errors import UserError

FOLDER = Path(__file__).parents[1] / "configs"


def shipped_configs() -> dict[str, Path]:
    """Name -> file."""
    return {file.stem: file for file in sorted(FOLDER.glob("*.yaml"))}


def description(file: Path) -> str:
    """A config's first line, which says what it is."""
    return file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").rstrip(".:")


def find_config(given: str | Path) -> Path:
    """A file as it is; else what the package ships: `digits_cnn`, `configs/digits_cnn.yaml`, `deepspeed/zero2.json`."""
    path = Path(given)
    if path.is_file() or path.is_absolute() or ".." in path.parts:
        return path
    inside = Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
    for name in (str(inside), f"{inside}.yaml"):
        if (FOLDER / name).is_file():
            return FOLDER / name
    return path


def is_config(given: str) -> bool:
    """Whether a word that may also be something else (a model, a schedule) is a config."""
    return given.endswith((".yaml", ".yml")) or find_config(given).is_file()


def cannot_be_read(file: Path, reason: str | None) -> UserError:
    near = get_close_matches(file.stem, shipped_configs(), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return UserError(f"{file}: cannot be read ({reason}); {hint}lockstep configs lists the ready ones")
