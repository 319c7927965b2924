"""`lockstep strategies`: every strategy on a line, with what it holds and sends."""

import pytest

from lockstep.cli import main
from lockstep.strategies import available_strategies


def test_every_strategy_is_listed_with_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--model.name",
        "gpt",
        "--model.size",
        "custom",
        "--model.d-model",
        "64",
        "--model.layers",
        "2",
        "--model.heads",
        "4",
    ]
    assert main(["strategies", *flags, "--model.vocabulary", "128", "--world-size", "4", "--batch-size", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    psi = int(next(line for line in lines if "Ψ = " in line).split("Ψ = ")[1].split()[0].replace(",", ""))
    rows = {line.split()[0]: line.split()[1:3] for line in lines if len(line.split()) > 3}
    assert set(available_strategies()) <= set(rows)
    assert float(rows["bucketed"][0]) == pytest.approx(16 * psi / 2**20, abs=0.6)
    assert float(rows["zero3"][0]) == pytest.approx(4 * psi / 2**20, abs=0.6)
    assert float(rows["ddp"][1]) == pytest.approx(2 * 4 * psi * 3 / 4 / 1e6, abs=0.06)
    assert float(rows["bucketed,tp=2"][0]) == pytest.approx(8 * psi / 2**20, abs=0.6)


def test_what_cannot_be_cut_has_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies", "--model.name", "cnn", "--world-size", "3"]) == 0
    rows = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines() if len(line.split()) > 3}
    assert rows["bucketed,tp=2"] == "-"
    assert main(["strategies", "--world-size", "0"]) == 2
