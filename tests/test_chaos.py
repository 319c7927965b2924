"""The fault suite itself: a part of it in real runs, and that it sees what is wrong."""

from pathlib import Path

import pytest

from lockstep.chaos.faults import ALL, BY_NAME
from lockstep.chaos.round import Round, Setting, play, undisturbed
from lockstep.cli import main
from lockstep.cli.chaos import lateness_of, mistakes_of
from lockstep.config import load_config, save_config

pytestmark = pytest.mark.alone


def test_every_fault_has_a_name_of_its_own_and_something_to_be_told() -> None:
    assert len(BY_NAME) == len(ALL)
    for fault in ALL:
        assert fault.named or fault.after == "resumed", fault.name
        assert fault.inside or fault.signal or fault.nodes or fault.after == "ends", fault.name


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "needs a config file first"),
        (["configs/digits_cnn.yaml", "--faults", "flood"], "--faults flood is unknown; there are all, kill-rank"),
        (["configs/digits_cnn.yaml", "--rounds", "0"], "--rounds is 0, but it must be 1 or more"),
        (["configs/digits_cnn.yaml", "--nproc", "1"], "--nproc is 1, but it must be 2 or more"),
        (["configs/none.yaml"], "configs/none.yaml"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", *argv]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Round("kill-rank", named=1.0, equal=True), ""),
        (Round("kill-rank", equal=True), "nothing named it"),
        (Round("kill-rank", named=1.0, equal=False), "not those of an undisturbed run"),
        (Round("kill-rank", named=1.0, equal=True, left=["process 5"]), "left process 5"),
        (Round("kill-rank", problem="ended with status 1"), "ended with status 1"),
    ],
)
def test_what_is_wrong_is_said(found: Round, said: str) -> None:
    lines = mistakes_of(found)
    assert lines == [] if not said else said in lines[0]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("chaos")
    config = load_config("configs/digits_cnn.yaml")
    config.train.steps, config.train.log_every, config.train.evaluate_every = 120, 5, 0
    config.checkpoint.every = 10
    save_config(config, folder / "config.yaml")
    return Setting(folder / "config.yaml", folder)


@pytest.fixture(scope="module")
def expected(setting: Setting) -> dict[str, object]:
    return dict(undisturbed(setting))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stop-rank", "full-disk"])  # the command tries all of them
def test_a_run_survives(name: str, setting: Setting, expected: dict[str, object]) -> None:
    fault = BY_NAME[name]
    found = play(setting, fault, 1, 35, 0, expected)
    assert mistakes_of(found) == [], found.output
    assert Path(setting.folder).exists()


def test_what_was_later_than_meant_is_said() -> None:
    assert lateness_of(Round("kill-rank", named=1.9, resumed=14.0), timeout=5.0) == []
    assert lateness_of(Round("stop-rank", named=6.9, resumed=14.0), timeout=5.0) == []  # a hang, and its time-out
    late = lateness_of(Round("kill-rank", named=2.8, resumed=42.0), timeout=5.0)
    assert late == ["kill-rank was named after 2.8 s, not 2", "kill-rank went on after 42.0 s, not 15"]
    assert lateness_of(Round("taken-port", named=9.0), timeout=5.0) == []
