"""The planner: models counted as they are, laws that no constant may break, and the commands."""

import csv
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cli import main
from lockstep.config import CNN, GPT, MLP, Config, ResNet, load_config
from lockstep.data import DataSpec
from lockstep.errors import UserError
from lockstep.models import build_model, forward_flops, parameter_count
from lockstep.plan.calibrate import Measured, machine_from
from lockstep.plan.check import judge as check
from lockstep.plan.choose import choose
from lockstep.plan.constants import fitted, told
from lockstep.plan.describe import network_of_gpt, network_of_hf
from lockstep.plan.known import KNOWN
from lockstep.plan.layout import Layout, illegal
from lockstep.plan.learn import layout_of
from lockstep.plan.links import collective_seconds
from lockstep.plan.machine import Link, kinds, machine_of, parse_cluster
from lockstep.plan.memory import memory_of
from lockstep.plan.network import transformer
from lockstep.plan.pipeline import enough, pipeline_seconds
from lockstep.plan.published import read_rows
from lockstep.plan.search import Question, least_gpus, neighbours, pareto, search
from lockstep.plan.step import Setting, step_time
from lockstep.plan.trace import network_of_config, traced
from tests.browser import Browser, chromium

ROOT = Path(__file__).parent.parent
H100 = machine_of("h100")
SMALL = transformer("small", 12, 768, 12, 3072, 50304, 1024, gated=False, tied=True)


# ---- what is known of a model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["small", "xl", "2.7b"])
@pytest.mark.parametrize("llama", [False, True])
def test_a_gpt_is_counted_as_it_is_built(size: str, llama: bool) -> None:
    form = {"norm": "rmsnorm", "position": "rope", "activation": "swiglu", "tied": False} if llama else {}
    config = GPT(size=size, context=256, vocabulary=1024, **form)  # type: ignore[arg-type]
    spec = DataSpec("tokens", (256,), 1024)
    with torch.device("meta"):
        model = build_model(config, spec)
    network = network_of_gpt(config)
    assert network.parameters == pytest.approx(parameter_count(model), rel=2e-3)  # biases
    counted = 3 * forward_flops(model, spec) / 256
    assert network.flops_per_token(counted_whole=True) == pytest.approx(counted, rel=1e-6)


@pytest.mark.parametrize("model", [ResNet(depth=18), ResNet(depth=50), CNN(), MLP(layers=4, width=64)])
def test_any_module_is_traced(model: ResNet | CNN | MLP) -> None:
    spec = DataSpec("images", (3, 32, 32), 10)
    network = network_of_config(Config(model=model), spec)
    with torch.device("meta"):
        built = build_model(model, spec)
    assert network.parameters == parameter_count(built)
    assert network.flops_per_token() == pytest.approx(3 * forward_flops(built, spec))


def test_a_module_that_cannot_run_is_one_line() -> None:
    with pytest.raises(UserError, match="cannot be traced on samples of 3"):
        traced(lambda: torch.nn.Linear(4, 4), (3,), "mine", None)


def test_known_models_have_the_parameters_that_they_are_called_by() -> None:
    billions = {"llama3-8b": 8.03, "llama3-70b": 70.6, "llama3-405b": 406, "llama2-7b": 6.74, "deepseek-v3": 671}
    billions |= {"qwen3-30b": 30.5, "qwen3-235b": 235, "mixtral-8x7b": 46.7, "gpt-oss-120b": 117, "kimi-k2": 1026}
    billions |= {"deepseek-v2": 236, "nemotron4-340b": 341}
    for name, billion in billions.items():
        assert KNOWN[name]().parameters / 1e9 == pytest.approx(billion, rel=0.04), name


HF = {
    "llama": {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
              "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
    "gpt2": {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
             "n_positions": 1024},
    "gpt_neox": {"model_type": "gpt_neox", "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
                 "intermediate_size": 24576, "vocab_size": 50432},
    "mixtral": {"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
                "num_experts_per_tok": 2},
    "deepseek_v3": {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
                    "num_attention_heads": 128, "intermediate_size": 18432, "vocab_size": 129280,
                    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
                    "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512,
                    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}  # fmt: skip
BILLIONS = {"llama": 8.03, "gpt2": 0.1244, "gpt_neox": 20.6, "mixtral": 46.7, "deepseek_v3": 671}


@pytest.mark.parametrize("kind", HF)
def test_hugging_face_configs_are_read(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF[kind]))
    network = network_of_hf(tmp_path, 2048)
    assert network.parameters / 1e9 == pytest.approx(BILLIONS[kind], rel=0.02)
    assert network.context == 2048


STRANGE = [
    {"hidden_size": 0},
    {"hidden_size": "many"},
    {"hidden_size": True},
    {"num_hidden_layers": 10**9},
    {"num_attention_heads": 33},
    {"num_key_value_heads": 7},
    {"intermediate_size": -5},
    {"vocab_size": 1e400},
    {"max_position_embeddings": -1},
    {"model_type": "abacus"},
    {"num_local_experts": 8, "num_experts_per_tok": 20},
    {"num_local_experts": 8, "first_k_dense_replace": 99},
    {"text_config": [1, 2]},
]


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, *(json.dumps({**HF["llama"], **odd}) for odd in STRANGE)])
def test_a_stranger_config_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="--hf"):
        network_of_hf(tmp_path, None)


def test_sizes_may_be_written_as_others_write_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**HF["llama"], "hidden_size": "4096", "vocab_size": 128256.0}))
    assert network_of_hf(tmp_path, 128).parameters / 1e9 == pytest.approx(8.03, rel=0.02)


def raises() -> torch.nn.Module:
    raise SystemExit(3)


@pytest.mark.parametrize("build", [lambda: None, raises, lambda: torch.nn.Linear(2, 2).to("nowhere")])
def test_a_module_that_cannot_be_built_is_one_line(build: Any) -> None:
    with pytest.raises(UserError):
        traced(build, (2,), "mine", None)


# ---- laws ------------------------------------------------------------------------------------------------------------

layouts = st.builds(
    Layout,
    dp=st.sampled_from([1, 2, 8, 16]),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    zero=st.integers(0, 1),
    schedule=st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
    micro_batch=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from(["none", "every", "full"]),
).map(lambda one: replace(one, global_batch=8 * one.dp * one.micro_batch))


def setting(layout: Layout, machine: str = "h100") -> Setting:
    return Setting(SMALL, layout, machine_of(machine))


@settings(max_examples=40, deadline=None)
@given(layouts)
def test_parts_add_up(layout: Layout) -> None:
    found, memory = step_time(setting(layout)), memory_of(setting(layout))
    assert found.seconds == pytest.approx(sum(found.terms.values()))
    assert all(seconds >= -1e-12 for seconds in found.terms.values())
    assert memory.total == pytest.approx(sum(memory.kinds.values()))


@settings(max_examples=40, deadline=None)
@given(layouts, st.integers(1, 3))
def test_more_ranks_never_need_more_memory_each(layout: Layout, zero: int) -> None:
    layout = replace(layout, zero=zero, pp=1 if zero > 1 else layout.pp)
    more = replace(layout, dp=2 * layout.dp, global_batch=2 * layout.global_batch)
    assert memory_of(setting(more)).total <= memory_of(setting(layout)).total * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(layouts)
def test_each_stage_holds_no_more_than_the_one_before(layout: Layout) -> None:
    layout = replace(layout, pp=1, dp=max(2, layout.dp))
    held = [memory_of(setting(replace(layout, zero=z))) for z in range(4)]
    kept = [sum(m.kinds[k] for k in ("parameters", "gradients", "optimizer")) for m in held]
    assert kept == sorted(kept, reverse=True)
    assert kept[3] < kept[2]


@settings(max_examples=40, deadline=None)
@given(layouts, st.sampled_from(["inside", "between"]))
def test_a_faster_link_is_never_slower(layout: Layout, which: str) -> None:
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

    told_of = seconds(many)
    original = pipeline.enough
    try:
        pipeline.enough = lambda *_: 10**6  # type: ignore[assignment]
        assert told_of == pytest.approx(seconds(many), rel=within)
    finally:
        pipeline.enough = original


# ---- constants and machines ------------------------------------------------------------------------------------------


def make_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tables", ROOT / "docs/make_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_at_most_fifty_constants_are_fitted_and_all_are_told() -> None:
    entries = told()
    assert sum(str(entry["from"]).startswith("fitted") for entry in entries.values()) <= 50
    assert all(entry["says"] and entry["value"] > 0 for entry in entries.values())


@pytest.mark.parametrize("page", ["planning.md", "choosing.md"])
def test_the_tables_of_the_docs_are_computed(page: str) -> None:
    tables = make_tables()
    assert (ROOT / "docs" / page).read_text() == tables.filled(page), "python docs/make_tables.py"


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
    answer = search(Question(large, parse_cluster("1x2xrtx4090"), 8))
    assert answer.plans == []
    assert answer.smallest is not None
    assert answer.refused["more memory than there is"] > 0
    assert least_gpus(Question(large, parse_cluster("1x2xrtx4090"), 8)) is None
    fewest = least_gpus(Question(large, parse_cluster("64x8xh100"), 512))
    assert fewest is not None
    assert 64 <= fewest[0] <= 512


def test_choosing_follows_the_memory() -> None:
    small, node = KNOWN["llama2-7b"]().with_context(2048), parse_cluster("1x8xa100-80")
    assert choose(SMALL, node, 64).strategy == "ddp"
    assert choose(small, parse_cluster("1x8xa100-40"), 64).strategy in ("zero2", "zero3")
    assert choose(small, parse_cluster("1x1xa100-40"), 8, finetune=True).strategy == "single+lora"
    assert "pp=" in choose(KNOWN["llama3-405b"](), parse_cluster("32x8xh100"), 256).strategy
    assert choose(KNOWN["llama3-405b"](), parse_cluster("1x1xh100"), 8).strategy == "none"


# ---- published rows --------------------------------------------------------------------------------------------------

ROW = {
    "source": "somebody/somewhere", "model": "Llama-3-8B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8,
    "ffn": 14336, "vocab": 128256, "seq": 8192, "gpu": "H100-80GB", "gpus": 64, "tp": 1, "pp": 1, "cp": 1, "dp": 64,
    "zero_stage": 3, "micro_batch": 1, "global_batch": 64, "recompute": "none", "precision": "bf16",
    "tokens_per_s_per_gpu": 9000,
}  # fmt: skip


def table(file: Path, *rows: dict[str, object]) -> Path:
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(ROW))
        writer.writeheader()
        writer.writerows(rows)
    return file


def test_plan_check_predicts_rows_and_says_what_it_cannot(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    odd = [{**ROW, "gpu": "abacus"}, {**ROW, "tp": ""}, {**ROW, "model": "Nobody-3", "layers": ""}]
    file = table(tmp_path / "t.csv", ROW, {**ROW, "model": "DeepSeekV3", "layers": "", "hidden": ""}, *odd)
    out = tmp_path / "out.csv"
    assert main(["plan", "check", str(file), "--out", str(out)]) == 0
    said = capfd.readouterr().out
    assert "'abacus' is not known here" in said
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert float(rows[0]["predicted_step_s"]) == pytest.approx(64 * 8192 / (9000 * 64), rel=0.4)
    assert float(rows[0]["predicted_peak_gib"]) > 10
    assert rows[0]["fits"] in ("fits", "risky", "does not fit")
    assert [row["predicted_step_s"] == "" for row in rows] == [False, False, True, True, True]
    assert rows[0]["model"] == "Llama-3-8B"


ODD = ("0", "-1", "x", "nan", "1e400", "3.7")


@pytest.mark.parametrize("column", ["seq", "tp", "dp", "layers", "hidden", "global_batch", "heads", "vocab"])
def test_one_bad_cell_costs_its_row_and_no_other(column: str, tmp_path: Path) -> None:
    file = table(tmp_path / "t.csv", *({**ROW, column: odd} for odd in ODD), ROW)
    file.write_text("\ufeff" + file.read_text())  # as Excel saves it
    judged = [check(row) for row in read_rows(file)]
    assert [one.time is not None for one in judged] == [False] * len(ODD) + [True]
    assert all(one.row.reason for one in judged[:-1])


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "source\nx\n"])
def test_a_table_that_is_none_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UserError):
        read_rows(tmp_path / "t.csv")


# ---- the commands ----------------------------------------------------------------------------------------------------


def test_plan_writes_what_it_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = {name: str(tmp_path / f"p.{name}") for name in ("csv", "json", "yaml")}
    flags = ["--model", "gpt", "--model.size", "2.7b", "--cluster", "4x8xh100", "--global-batch", "512"]
    flags += ["--context", "2048", "--tokens", "300B", "--explain", "--csv", files["csv"], "--json", files["json"]]
    assert main(["plan", *flags, "--out", files["yaml"], "--top", "3"]) == 0
    said = capfd.readouterr().out
    for words in ("tokens/s", "MFU", "GPU-hours", "fewest GPUs", "one step away", "plan/kernels.py", "fits"):
        assert words in said
    shown = list(csv.DictReader(Path(files["csv"]).read_text().splitlines()))
    assert [row["fits"] for row in shown][:3] == ["fits"] * 3
    rows = json.loads(Path(files["json"]).read_text())["result"]["rows"]
    assert rows[0]["step_s"] == pytest.approx(sum(rows[0][k] for k in rows[0] if k.endswith("_s") and k in TERMS))
    rows = [row for row in rows if row["fits"] == "fits"]
    config = load_config(files["yaml"])
    assert config.plan.step_ms == pytest.approx(1e3 * rows[0]["step_s"], rel=1e-3)
    assert (layout_of(config, 32).micro_batches == rows[0]["dp"] and False) or config.train.batch_size == 512


TERMS = {f"{name}_s" for name in step_time(setting(Layout())).terms}


def test_a_planned_config_trains_and_is_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """plan --out -> train -> plan learn, on CPU ranks."""
    monkeypatch.chdir(tmp_path)
    machine_from([measured()], {}).save(tmp_path / "machine.yaml")
    flags = ["--model", "gpt", "--model.d-model", "64", "--model.layers", "2", "--model.heads", "4", "--context", "32"]
    flags += ["--model.vocabulary", "256", "--cluster", "1x2xmachine.yaml", "--global-batch", "8"]
    assert main(["plan", *flags, "--precision", "fp32", "--out", "run.yaml"]) == 0
    capfd.readouterr()
    steps = ["--train.steps", "6", "--train.log-every", "1", "--device", "cpu", "--run-dir", "r"]
    assert main(["train", "run.yaml", "--nproc", "2", *steps]) == 0
    assert "predicted: a step of" in capfd.readouterr().out
    assert main(["plan", "learn", "r"]) == 0
    assert "step factor" in capfd.readouterr().out
    assert parse_cluster("2xmachine.yaml").machine.factors["step"] > 0
    assert main(["plan", "run.yaml", "--cluster", "1x2xmachine.yaml", "--precision", "fp32"]) == 0


def measured() -> Measured:
    products = [(m, k, n, "fp32", 2 * m * k * n / 5e10) for m, k, n in ((512, 512, 512), (1024, 1024, 1024))]
    return Measured(products, [(4, 4, 256, 32, 1e-3)], 1e10, 1, 8 * 2**30, "CPU")


def test_calibration_makes_the_formulas_say_what_was_measured() -> None:
    from lockstep.plan.kernels import product_seconds

    machine = machine_from([measured(), measured()], {"all_gather 4096": 1e-4, "all_gather 16777216": 1e-2})
    c = fitted()
    changed = c.changed(**{n: c[n] * f for n, f in machine.factors.items()})
    said = [product_seconds(m, k, n, "fp32", machine, changed) for m, k, n, _, _ in measured().products]
    for one, (_, _, _, _, seconds) in zip(said, measured().products, strict=True):
        assert one == pytest.approx(seconds, rel=0.2)
    assert collective_seconds(16777216, 2, 1, machine, c) == pytest.approx(1e-2, rel=0.05)


MISTAKES = {
    "plan --cluster 4x8xh900": "there is no machine 'h900'",
    "plan nothing-7b": "nothing-7b is no model that is known here",
    "plan --tokens many": "--tokens many: give a number, as 300B or 15T",
    "plan --fix tp": "--fix tp: give name=value",
    "plan --fix tp=two": "--fix tp=two: tp must be a whole number",
    "plan --fix recompute=some": "it must be one of none",
    "plan --fix micro_batch=0": "micro_batch must be from 1",
    "plan --fix zero=7": "zero must be from 0 to 3",
    "plan --fix tp=8,tp=4": "something is given twice",
    "plan --global-batch 99999999999999999999999": "it must be from 1 to 1,000,000,000",
    "plan llama3-8b --hf x.json": "both say which model",
    "plan --model gpt --model.context 0": "model.context is 0",
    "choose --model llama2-7b --cluster 1x8xh100 --finetune no --context -3": "--context is -3",
    "choose --model llama2-7b --cluster 1x8xh100 --finetune no --global-batch 0": "--global-batch is 0",
    "choose --model resnet18 --cluster 1x8xh100 --finetune yes": "adapters (LoRA) are for transformers",
    "plan --global-batch 0 --model gpt": "--global-batch is 0",
    "plan my.nets:make": "needs --batch-shape",
    "plan --hf /nowhere": "--hf /nowhere cannot be read",
    "plan --top 0": "--top is 0, but it must be 1 or more",
    "plan llama3-8b --out x.yaml": "--out writes configs of our own models",
    "plan check": "lockstep plan check needs a table",
    "plan check /nowhere.csv": "/nowhere.csv cannot be read",
    "plan learn": "lockstep plan learn needs runs",
    "plan learn runs/none --machine /nowhere.yaml": "--machine /nowhere.yaml: there is no such file",
    "choose --model llama2-7b --cluster 1x8xh100": "--finetune is missing, and there is nobody to ask",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_one_line(words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115
    assert main(words.split()) == 2
    err = capfd.readouterr().err
    assert MISTAKES[words] in err
    assert err.count("\n") == 1


def wait_until(browser: Browser, script: str) -> None:
    for _ in range(100):
        if browser.run(script):
            return
        browser.run("new Promise(done => setTimeout(done, 50))", awaited=True)
    raise AssertionError(script)


@pytest.mark.skipif(chromium() is None, reason="no Chromium here")
def test_the_page_shows_filters_and_answers_a_click(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    flags = ["--cluster", "2x8xa100-80", "--global-batch", "256", "--context", "2048", "--html", str(page)]
    assert main(["plan", "llama2-7b", *flags]) == 0
    with Browser() as browser:
        browser.open(page)
        wait_until(browser, "document.querySelectorAll('#points svg path').length > 5")
        assert browser.run("document.querySelectorAll('#filters select').length") > 3
        before = browser.run("document.getElementById('count').textContent")
        browser.run(
            "(() => { const s = document.getElementById('filter-zero'); s.selectedIndex = 1; "
            "s.dispatchEvent(new Event('change')); return 1; })()"
        )
        wait_until(browser, f"document.getElementById('count').textContent !== {json.dumps(before)}")
        chosen = browser.run("document.getElementById('chosen').textContent")
        browser.run("choose(page.plans[page.plans.length - 1].number)")
        wait_until(browser, f"document.getElementById('chosen').textContent !== {json.dumps(chosen)}")
        wait_until(browser, "document.querySelectorAll('#memory svg').length === 1")
        assert browser.problems == []
        assert [url for url in browser.fetched if not url.startswith(("file:", "data:", "about:"))] == []
