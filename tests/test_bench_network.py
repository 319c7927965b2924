"""What share of a step communication would take on a slower network: the formula, by hand."""

from dataclasses import replace

import pytest

from lockstep.bench.network import predicted_exposed_ms, predicted_share
from lockstep.comm.ledger import Traffic
from tests.test_bench_train import timing


def test_the_formula_of_a_slow_network_where_the_model_is_cut() -> None:
    tensor, native = (
        timing(n, [0.1] * 3, exposed_s=[0.0] * 3, traffic=[Traffic(4, 12.5e6, 0.0, {"tp": 12.5e6})] * 3)
        for n in ("single,tp=2", "single,tp=2:native")
    )
    assert predicted_exposed_ms(tensor, 1.0) == pytest.approx(100 - 100 / 3)  # products of weights hide a third
    assert predicted_exposed_ms(tensor, 10.0) == pytest.approx(5.0)  # forward's half stands in the way
    assert predicted_exposed_ms(native, 1.0) == pytest.approx(100.0)
    stages = timing(
        "single,pp=2:gpipe", [0.1] * 3, exposed_s=[0.05] * 3, traffic=[Traffic(8, 1e6, 0.0, {"pp": 1e6})] * 3
    )
    experts = timing(
        "bucketed,ep=2", [0.1] * 3, exposed_s=[0.0] * 3, traffic=[Traffic(9, 25e6, 0.0, {"ep": 12.5e6})] * 3
    )
    assert predicted_exposed_ms(experts, 1.0) == pytest.approx(100 + 100 - 200 / 3)  # tokens beside gradients
    # 50 ms of computation: a bubble of a quarter (4 micro-batches), of 8 ms on the wire one in four, else as here
    assert predicted_exposed_ms(stages, 1.0) == pytest.approx(50.0)
    assert predicted_exposed_ms(stages, 0.1) == pytest.approx(50.0)  # 30 ms that computation cannot hide, 12.5 idle
    assert predicted_exposed_ms(stages, 0.05) == pytest.approx(12.5 + 160 - 50)


def test_the_formula_of_a_slow_network() -> None:
    naive, bucketed = (
        timing(n, [0.1] * 3, exposed_s=[0.0] * 3, traffic=[Traffic(4, 12.5e6)] * 3) for n in ("naive", "ddp")
    )
    assert predicted_exposed_ms(naive, 1.0) == pytest.approx(100.0)  # 12.5 MB at 125 MB/s
    assert predicted_share(naive, 1.0) == pytest.approx(0.5)
    assert predicted_exposed_ms(bucketed, 1.0) == pytest.approx(100 - 200 / 3)  # backward hides two thirds of 100 ms
    assert predicted_exposed_ms(bucketed, 10.0) == pytest.approx(2.5)  # one of four cannot be hidden
    sharded = timing("zero1", [0.1] * 3, exposed_s=[0.0] * 3, traffic=[Traffic(4, 12.5e6, 6.25e6)] * 3)
    assert predicted_exposed_ms(sharded, 1.0) == pytest.approx(
        50 - 100 / 3 + 12.5
    )  # the next forward hides a third of 100 ms of the parameters
    assert predicted_exposed_ms(replace(bucketed, exposed_s=[0.03] * 3), 25.0) == pytest.approx(30.0)  # as here
    uneven = replace(bucketed, exposed_s=[0.03] * 3, imbalance_s=[0.02] * 3)
    assert predicted_exposed_ms(uneven, 1.0) == pytest.approx(20 + 100 - 2 / 3 * 70)  # slower ranks come on top
    assert predicted_exposed_ms(replace(bucketed, accumulation=4), 1.0) == pytest.approx(100 - 200 / 3 / 4)
