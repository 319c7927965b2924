"""`lockstep strategies`: every strategy on a line, with what it holds and sends."""

import shlex

import pytest

from lockstep.cli import main
from lockstep.strategies import available_strategies

MODEL = "--model.name gpt --model.size custom --model.d-model 64 --model.layers 2 --model.heads 4"
SMALL = [*shlex.split(MODEL), "--model.vocabulary", "128", "--world-size", "4", "--batch-size", "8"]


def listed(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, list[str]]]:
    """Ψ; strategy -> (MiB held, MB sent)."""
    assert main(["strategies", *SMALL, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    psi = int(next(line for line in lines if "Ψ = " in line).split("Ψ = ")[1].split()[0].replace(",", ""))
    return psi, {line.split()[0]: line.split()[1:3] for line in lines if len(line.split()) > 3}


def test_every_strategy_is_listed_with_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    psi, rows = listed(capsys)
    assert not any("ep=" in row for row in rows)
    assert set(available_strategies()) <= set(rows)
    assert float(rows["bucketed"][0]) == pytest.approx(16 * psi / 2**20, abs=0.6)
    assert float(rows["zero3"][0]) == pytest.approx(4 * psi / 2**20, abs=0.6)
    assert float(rows["ddp"][1]) == pytest.approx(2 * 4 * psi * 3 / 4 / 1e6, abs=0.06)
    assert float(rows["bucketed,tp=2"][0]) == pytest.approx(8 * psi / 2**20, abs=0.6)


def test_experts_have_rows_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    wide = ["--model.context", "64", "--model.expert-width", "512", "--model.experts", "4", "--model.active", "2"]
    psi, rows = listed(capsys, *wide)
    experts = 2 * 4 * 3 * 64 * 512
    assert float(rows["bucketed,ep=2"][0]) == pytest.approx(16 * (psi - experts / 2) / 2**20, abs=0.6)
    assert float(rows["zero3,ep=2"][0]) == pytest.approx(4 * psi / 2**20, abs=0.6)
    tokens = 2 * 64  # of a rank: two samples
    travels = 2 * (4 * tokens * 2 * 64 * 1 / 2) * 4
    reduced = 2 * 4 * ((psi - experts) * 3 / 4 + experts / 2 * 1 / 2)
    assert float(rows["bucketed,ep=2"][1]) == pytest.approx((travels + reduced) / 1e6, abs=0.06)


def test_what_cannot_be_cut_has_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies", "--model.name", "cnn", "--world-size", "3"]) == 0
    rows = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines() if len(line.split()) > 3}
    assert rows["bucketed,tp=2"] == "-"
    assert main(["strategies", "--world-size", "0"]) == 2
