"""`lockstep plan`, `plan check`, `plan learn`, `choose`: tables of others, files, mistakes, the page."""

import csv
import json
import shlex
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.cli.flags import config_from, refuse_unknown
from lockstep.config import load_config
from lockstep.errors import UserError
from lockstep.plan import step
from lockstep.plan.calibrate import Measured, kind_of, machine_from
from lockstep.plan.check import judge as check
from lockstep.plan.constants import fitted
from lockstep.plan.learn import layout_of
from lockstep.plan.links import collective_seconds, message_seconds
from lockstep.plan.machine import machine_of, parse_cluster, read_machine
from lockstep.plan.network import transformer
from lockstep.plan.published import read_rows
from tests.browser import Browser, chromium

ROOT = Path(__file__).parent.parent
H100 = machine_of("h100")
SMALL = transformer("small", 12, 768, 12, 3072, 50304, 1024, gated=False, tied=True)


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


TERMS = {f"{name}_s" for name in step.TERMS}


@pytest.mark.slow
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


def test_calibration_makes_the_formulas_say_what_was_measured(tmp_path: Path) -> None:
    from lockstep.plan.kernels import product_seconds

    links = {("all_gather", 4096): 1e-4, ("all_gather", 16777216): 1e-2, ("reduce_scatter", 16777216): 1e-2}
    links |= {("all_reduce", 16777216): 2e-2, ("send_recv", 16777216): 4e-2}
    machine = machine_from([measured(), measured()], links)
    c = fitted()
    changed = c.scaled(machine.factors)
    said = [product_seconds(m, k, n, "fp32", machine, changed) for m, k, n, _, _ in measured().products]
    for one, (_, _, _, _, seconds) in zip(said, measured().products, strict=True):
        assert one == pytest.approx(seconds, rel=0.2)
    assert collective_seconds(16777216, 2, 1, machine, c) == pytest.approx(1e-2, rel=0.05)
    eight = machine_from([measured()] * 8, links)
    assert collective_seconds(16777216, 8, 1, eight, c) == pytest.approx(1e-2, rel=0.2)
    assert message_seconds(16777216, 1, machine, c) == pytest.approx(4e-2, rel=0.05)
    machine.save(tmp_path / "machine.yaml")
    assert read_machine(tmp_path / "machine.yaml").inside == machine.inside


def test_a_gpu_is_known_by_its_whole_name() -> None:
    names = {"NVIDIA H200": "h200", "NVIDIA H20": "h20", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA GB200": "gb200"}
    names |= {
        "NVIDIA A100-SXM4-80GB": "a100-80",
        "NVIDIA A100-PCIE-40GB": "a100-pcie",
        "Tesla V100-SXM2-32GB": "v100-32",
    }
    assert {name: kind_of(name) for name in names} == names


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
    "choose --model llama2-7b --cluster 1x8xh100": "--finetune is missing, and there is no terminal to ask at",
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
@pytest.mark.slow
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


@pytest.mark.parametrize("model", ["gpt2-xl", "resnet50"])
def test_the_command_that_choose_prints_is_one_that_train_takes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["choose", "--model", model, "--cluster", "1x4xv100-32", "--global-batch", "64", "--finetune", "no"]) == 0
    )
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("lockstep train "))
    words = shlex.split(command)[2:]
    config, rest = config_from(words)
    refuse_unknown("train", "lockstep.cli.train", rest)
    assert config.model.name == ("gpt" if model == "gpt2-xl" else "resnet")
    assert words[words.index("--train.precision") + 1] == "fp16", "a V100 has no units for bf16"
    assert words[words.index("--train.batch-size") + 1] == "64"


def test_experts_are_chosen_for_what_trains_them(capsys: pytest.CaptureFixture[str]) -> None:
    """A published mixture has a config; of another one only the layout is known."""
    cluster = ["--cluster", "2x8xh100", "--global-batch", "128", "--finetune", "no"]
    assert main(["choose", "--model", "mixtral-8x7b", *cluster]) == 0
    command = next(line for line in capsys.readouterr().out.splitlines() if " train mixtral_8x7b " in line)
    words = shlex.split(command)
    config, rest = config_from(words[words.index("train") + 1 :])
    refuse_unknown("train", "lockstep.cli.train", rest)
    assert config.parallel.ep == int(words[words.index("--parallel.ep") + 1]) > 1
    assert main(["choose", "--model", "mixtral-8x22b", *cluster[:1], "8x8xh100", *cluster[2:]]) == 0
    assert "what one would run elsewhere: lockstep train spreads the experts of its own GPT" in capsys.readouterr().out


def test_a_planned_mixture_is_one_that_train_takes(tmp_path: Path) -> None:
    out = tmp_path / "run.yaml"
    flags = ["--model.experts", "8", "--cluster", "1x4xh100", "--fix", "ep=4,tp=2", "--out", str(out)]
    assert main(["plan", "--model.size", "small", *flags]) == 0
    parallel = load_config(out).parallel
    assert (parallel.tp, parallel.ep, parallel.cut_experts) == (2, 4, False)
    assert layout_of(load_config(out), 4).ep == 4
