"""The planner: laws that no constant may break, machines, and the search."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import UserError
from lockstep.plan.choose import choose
from lockstep.plan.constants import entries, fitted
from lockstep.plan.known import KNOWN
from lockstep.plan.layout import PlanLayout, illegal
from lockstep.plan.links import collective_seconds
from lockstep.plan.machine import Link, kinds, machine_of, parse_cluster
from lockstep.plan.memory import memory_of
from lockstep.plan.network import transformer
from lockstep.plan.pipeline import enough, pipeline_seconds
from lockstep.plan.search import Question, judge, least_gpus, neighbours, pareto, search
from lockstep.plan.setting import Setting
from lockstep.plan.step import step_time

ROOT = Path(__file__).parent.parent
H100 = machine_of("h100")
SMALL = transformer("small", 12, 768, 12, 3072, 50304, 1024, gated=False, tied=True)


# ---- laws ------------------------------------------------------------------------------------------------------------

layouts = st.builds(
    PlanLayout,
    dp=st.sampled_from([1, 2, 8, 16]),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    zero=st.integers(0, 1),
    schedule=st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
    micro_batch=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from(["none", "every", "full"]),
).map(lambda one: replace(one, global_batch=8 * one.dp * one.micro_batch))


def setting(layout: PlanLayout, machine: str = "h100") -> Setting:
    return Setting(SMALL, layout, machine_of(machine))


@settings(max_examples=40, deadline=None)
@given(layouts)
def test_parts_add_up(layout: PlanLayout) -> None:
    found, memory = step_time(setting(layout)), memory_of(setting(layout))
    assert found.seconds == pytest.approx(sum(found.terms.values()))
    assert all(seconds >= -1e-12 for seconds in found.terms.values())
    assert memory.total == pytest.approx(sum(memory.kinds.values()))


@settings(max_examples=40, deadline=None)
@given(layouts, st.integers(1, 3))
def test_more_ranks_never_need_more_memory_each(layout: PlanLayout, zero: int) -> None:
    layout = replace(layout, zero=zero, pp=1 if zero > 1 else layout.pp)
    more = replace(layout, dp=2 * layout.dp, global_batch=2 * layout.global_batch)
    assert memory_of(setting(more)).total <= memory_of(setting(layout)).total * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(layouts)
def test_each_stage_holds_no_more_than_the_one_before(layout: PlanLayout) -> None:
    layout = replace(layout, pp=1, dp=max(2, layout.dp))
    held = [memory_of(setting(replace(layout, zero=z))) for z in range(4)]
    kept = [sum(m.kinds[k] for k in ("parameters", "gradients", "optimizer")) for m in held]
    assert kept == sorted(kept, reverse=True)
    assert kept[3] < kept[2]


@settings(max_examples=40, deadline=None)
@given(layouts, st.sampled_from(["inside", "between"]))
def test_a_faster_link_is_never_slower(layout: PlanLayout, which: str) -> None:
    old = getattr(H100, which)
    faster = replace(H100, **{which: Link(2 * old.gb_per_s, old.latency_us)})
    before, after = setting(layout), replace(setting(layout), machine=faster)
    assert step_time(after).seconds <= step_time(before).seconds * (1 + 1e-3)  # the pipeline's clock is rounded


def test_a_collective_over_several_nodes_takes_the_links_between_them() -> None:
    c = fitted()
    inside = collective_seconds(1e9, 8, 1, H100, c)
    assert collective_seconds(1e9, 16, 1, H100, c) > inside
    assert collective_seconds(1e9, 8, 8, H100, c) > 5 * inside  # one GPU of each node: nothing inside carries it
    assert collective_seconds(1e9, 1, 1, H100, c) == 0.0


@pytest.mark.parametrize(
    ("schedule", "chunks", "within"), [("1f1b", 1, 0.01), ("zb-h1", 1, 0.01), ("interleaved", 2, 0.02)]
)
def test_some_micro_batches_tell_of_all(schedule: str, chunks: int, within: float) -> None:
    forward, backward = [1.0, 1.1, 1.0, 1.5], [2.0, 2.2, 2.0, 3.0]
    many = 8 * enough(schedule, 4) // 4 * 4

    def seconds(m: int) -> float:
        return pipeline_seconds(schedule, 4, m, chunks, forward, backward, 0.02)

    from lockstep.plan import pipeline

    seen = seconds(many)
    original = pipeline.enough
    try:
        pipeline.enough = lambda *_: 10**6  # type: ignore[assignment]
        assert seen == pytest.approx(seconds(many), rel=within)
    finally:
        pipeline.enough = original


# ---- constants and machines ------------------------------------------------------------------------------------------


def test_at_most_fifty_constants_are_fitted_and_all_are_described() -> None:
    listed = entries()
    assert sum(str(entry["from"]).startswith("fitted") for entry in listed.values()) <= 50
    assert all(entry["says"] and entry["value"] > 0 for entry in listed.values())


@pytest.mark.parametrize("kind", kinds())
def test_every_machine_file_says_where_its_figures_are_from(kind: str) -> None:
    machine = machine_of(kind)
    assert {"peak_tflops, memory", "inside", "between", "latency_us"} <= set(machine.sources)
    assert machine.inside.gb_per_s >= machine.between.gb_per_s


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4x8xh900", "there is no machine 'h900'"),
        ("0x8xh100", "at least one node"),
        ("here", "lockstep calibrate writes it"),
        ("2xnothing.yaml", "cannot be read"),
    ],
)
def test_wrong_clusters_are_one_line(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        parse_cluster(text)


WRONG = {
    "sustained": [".nan", "0", "-1", "5"],
    "processors": ["0", "-4", "x"],
    "memory_gib": [".inf", "-80"],
    "factors": ["[1, 2]", "{step: 0}", "{step: x}", "{step: .nan}", "{memory: -1}", "{nosuch: 2}"],
    "inside": ["{gb_per_s: 450, latency_us: .nan}", "{gb_per_s: 450, latency_us: -1}", "3"],
    "peak_tflops": ["3", "{}", "{bf16: .inf}", "{bf16: -1}"],
}


@pytest.mark.parametrize("text", ["title: x", "[]", *(f"{key}: {value}" for key in WRONG for value in WRONG[key])])
def test_a_machine_file_that_is_none_is_one_line(text: str, tmp_path: Path) -> None:
    machine_of("h100").save(tmp_path / "m.yaml")
    values = yaml.safe_load((tmp_path / "m.yaml").read_text())
    changed = yaml.safe_load(text)
    whole = {**values, **changed} if isinstance(changed, dict) and text != "title: x" else changed
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(whole))
    with pytest.raises(UserError):
        parse_cluster(f"1x8x{tmp_path / 'm.yaml'}")


# ---- search ----------------------------------------------------------------------------------------------------------


def question(**changed: object) -> Question:
    return replace(Question(SMALL, parse_cluster("1x8xh100"), 64), **changed)  # type: ignore[arg-type]


def test_the_search_gives_what_is_legal_and_fits_fastest_first() -> None:
    answer = search(question())
    assert answer.plans
    times = [plan.time.seconds for plan in answer.plans]
    assert times == sorted(times)
    assert all(illegal(SMALL, plan.layout, 8) is None for plan in answer.plans)
    assert all(plan.fits != "does not fit" for plan in answer.plans)
    front = pareto(answer.plans)
    assert front[0].time.seconds == times[0]
    assert all(isinstance(found, str) or found.time.seconds > 0 for _, found in neighbours(question(), answer.plans[0]))


def test_a_model_that_fits_one_gpu_is_said_to() -> None:
    fewest = least_gpus(question())
    assert fewest is not None
    assert fewest[0] == 1


def test_what_contradicts_itself_says_why() -> None:
    for fixed, said in (
        ((("tp", 3),), "tp 3"),
        ((("pp", 3),), "pp 3"),
        ((("schedule", "zb-v"), ("pp", 2), ("chunks", 3)), "zb-v"),
    ):
        answer = search(question(fixed=fixed))
        assert answer.plans == []
        assert any(said in reason for reason in answer.refused), fixed


def test_what_is_fixed_stays() -> None:
    for plan in search(question(fixed=(("tp", 2), ("zero", 1), ("recompute", "full")))).plans:
        assert (plan.layout.tp, plan.layout.zero, plan.layout.recompute) == (2, 1, "full")


def test_what_does_not_fit_says_why() -> None:
    large = KNOWN["llama3-405b"]()
    asked = Question(large, parse_cluster("1x2xrtx4090"), 8)
    answer = search(asked)
    assert answer.plans == []
    assert answer.refused["more memory than there is"] == answer.considered > 0
    assert answer.smallest is not None
    smallest = judge(asked, answer.smallest)
    assert smallest.fits == "does not fit"
    assert smallest.memory.gib > 24, "of an RTX 4090"
    whole = judge(asked, replace(answer.smallest, recompute="none"))
    assert smallest.memory.gib <= whole.memory.gib
    assert least_gpus(asked) is None
    fewest = least_gpus(Question(large, parse_cluster("64x8xh100"), 512))
    assert fewest is not None
    assert 64 <= fewest[0] <= 512
    half = search(Question(large, parse_cluster(f"{max(1, fewest[0] // 16)}x8xh100"), 512, fixed=(("offload", False),)))
    assert half.plans == [], "it would have been fewer"


def test_choosing_follows_the_memory() -> None:
    small, node = KNOWN["llama2-7b"]().with_context(2048), parse_cluster("1x8xa100-80")
    assert choose(SMALL, node, 64).strategy == "ddp"
    assert choose(small, parse_cluster("1x8xa100-40"), 64).strategy in ("zero2", "zero3")
    assert choose(small, parse_cluster("1x1xa100-40"), 8, finetune=True).strategy == "single+lora"
    assert "pp=" in choose(KNOWN["llama3-405b"](), parse_cluster("32x8xh100"), 256).strategy
    assert choose(KNOWN["llama3-405b"](), parse_cluster("1x1xh100"), 8).strategy == "none"
