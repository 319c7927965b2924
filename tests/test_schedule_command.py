"""`lockstep schedule`: drawn in the terminal, to files, and beside a real run."""

from pathlib import Path

import pytest

from lockstep.cli import main
from tests.browser import Browser, chromium


def test_it_draws_in_the_terminal_and_to_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, file in (("1f1b", "a.svg"), ("interleaved", "b.png")):
        chunks = ["--chunks", "2"] if name == "interleaved" else []
        command = ["schedule", name, "--stages", "4", "--micro-batches", "8", *chunks, "--out", str(tmp_path / file)]
        assert main(command) == 0
        assert (tmp_path / file).stat().st_size > 5000
    out = capsys.readouterr().out
    assert "by theory: a step takes 33, of which a stage stands idle 27.3%" in out
    assert "micro-batches held at most, by stage: 4, 3, 2, 1" in out
    assert "by theory: a step takes 28.5" in out
    assert (
        main(["schedule", "gpipe", "--stages", "2", "--micro-batches", "3", "--forward", "2", "--backward", "2"]) == 0
    )
    assert "a step takes 16" in capsys.readouterr().out


@pytest.mark.slow
def test_a_configs_own_steps_stand_beside_theory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also with data parallelism: the first pipeline of two, each of two stages, of which the first recomputes."""
    small = ["--model.d-model", "32", "--model.layers", "2", "--model.context", "16", "--data.name", "synthetic"]
    flags = ["--parallel.recompute-stages", "0", "--train.recompute", "full", "--nproc", "4", "--oversubscribe"]
    drawn = ["--run", "--out", str(tmp_path / "step.svg"), "--device", "cpu"]
    assert main(["schedule", "configs/gpt_pp.yaml", *small, *flags, *drawn]) == 0
    out = capsys.readouterr().out
    assert "1f1b, 2 stages, 8 micro-batches" in out
    assert "by theory: a step takes 27" in out
    assert "measured: a step takes" in out
    assert (tmp_path / "step.svg").stat().st_size > 5000


@pytest.mark.skipif(chromium() is None, reason="no Chromium")
@pytest.mark.slow
def test_a_real_run_stands_beside_it_on_a_page_that_steps_through_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "zb.html"
    flags = ["--stages", "2", "--micro-batches", "4", "--run", "--device", "cpu", "--out", str(page)]
    assert main(["schedule", "zb-h1", *flags]) == 0
    assert "measured: a step takes" in capsys.readouterr().out
    with Browser() as browser:
        browser.open(page)
        assert browser.run("document.querySelectorAll('svg rect').length") == 2 * 2 * 4 * 3
        assert browser.run("document.querySelectorAll('.later').length") == 0
        for _ in range(8):
            browser.run("document.getElementById('back').click()")
        assert browser.run("document.querySelectorAll('.later').length") > 0
        assert "stage 1: " in browser.run("drawings[0].said.textContent")
        assert browser.problems == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["schedule"], "needs a name: one of naive, gpipe"),
        (["schedule", "2f2b"], "must be one of naive, gpipe"),
        (["schedule", "interleaved", "--micro-batches", "7", "--chunks", "2"], "use 8, or 1f1b"),
        (["schedule", "1f1b", "--stages", "0"], "0 stages"),
        (["schedule", "1f1b", "--forward", "0"], "must be above 0"),
        (["schedule", "1f1b", "--out", "x.gif"], "must end in .svg, .png or .pdf"),
        (["schedule", "configs/zero1.yaml"], "has no pipeline; give --parallel.pp 2"),
        (["schedule", "configs/gpt_pp.yaml", "--parallel.pp", "9"], "and it has 6 layers"),
        (["schedule", "configs/gpt_pp.yaml", "--parallel.native", "pp"], "whose passes torch keeps to itself"),
        (["schedule", "configs/gpt_pp.yaml", "--parallel.recompute-stages", "2"], "there are 0 to 1"),
    ],
)
def test_mistakes_are_one_line(command: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    assert said in capsys.readouterr().err
