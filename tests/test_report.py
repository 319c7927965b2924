"""`lockstep report`: results in, one page out, and the page works in a real browser."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.errors import UserError
from lockstep.report import gather, write_report
from lockstep.report.page import decimals, readable
from lockstep.report.sections import section
from lockstep.results.chart import draw, library
from lockstep.results.palette import PALETTE, contrast, distinguished
from lockstep.results.record import Record, read_record
from tests.browser import Browser, chromium

ENVIRONMENT = {"processor": "a processor", "cores": 4, "torch": "2.13"}


def record(kind: str, result: dict[str, Any], **more: Any) -> Record:
    return Record(kind, result, command=f"lockstep {kind}", when="now", environment=ENVIRONMENT, **more)


def collective(start: float, purpose: str = "gradients") -> dict[str, Any]:
    times = {"issued": start, "over": start + 3.0, "wait_started": start + 2.0, "wait_ended": start + 3.0}
    return {"operation": "all_reduce", "purpose": purpose, "subject": "bucket 0", "nbytes": 4096, **times}


def a_timeline(rank: int, forward: float = 4.0) -> dict[str, Any]:
    phases = [{"name": "forward", "start": 0.0, "end": forward}, {"name": "backward", "start": forward, "end": 12.0}]
    return {"rank": rank, "phases": phases, "collectives": [collective(5.0 + i) for i in range(4)]}


def bench_rows() -> list[dict[str, Any]]:
    """Two strategies; the text is what would break a page that trusts it."""
    rows = []
    for label, step in (("<b>ddp</b> & <!--<script>", 20.0), ("bucketed", 9.5)):
        times = {"label": label, "step_ms": step, "p10_ms": step - 1, "p90_ms": step + 2, "mfu": 0.41}
        parts = {"compute_ms": step - 3, "exposed_ms": 3.0, "exposed_fraction": 3 / step, "samples_per_s": 1e3 / step}
        memory = {"parameters_mib": 10.0, "gradients_mib": 10.0, "optimizer_mib": 20.0, "peak_mib": 44.0}
        rows.append({**times, **parts, **memory, "timelines": [a_timeline(rank, step / 5) for rank in (0, 1)]})
    return rows


def records() -> list[Record]:
    comm = [
        {"collective": "all_reduce", "backend": b, "algorithm": "native", "size_bytes": n, "time_us": 5.0 + n / 1e3}
        | {"p50_us": 4.0 + n / 1e3, "p99_us": 9.0, "algbw_gbps": 0.1 * n, "busbw_gbps": 0.1 * n, "wrong": 0}
        for b in ("shm", "gloo")
        for n in (8, 64, 4096)
    ]
    points = [
        {"mode": mode, "ranks": n, "batch_size": 8, "step_ms": 10.0 / n, "samples_per_s": 1.0, "speedup": 0.9 * n}
        | {"efficiency": 0.9, "ideal_ms": 9.0 / n, "communication_ms": 0.5, "imbalance_ms": 0.1, "cores_ms": 0.0}
        | {"other_ms": -0.2}
        for mode in ("strong", "weak")
        for n in (1, 2, 4)
    ]
    shares = {"compute": 0.5, "memory": 0.2, "communication": 0.2, "data": 0.0, "host": 0.1}
    profile = {"diagnoses": [{"shares": shares, "step_ms": 12.0}], "timelines": [a_timeline(0)], "words": ["bound by"]}
    losses = {"single": [2.0, 1.5, 1.2], "zero3": [2.0, 1.5, 1.2]}
    return [
        record("bench train", {"rows": bench_rows(), "losses": losses}, title="two strategies", config={"train": {}}),
        record("bench comm", {"rows": comm}, title="all_reduce"),
        record("bench scaling", {"points": points, "serial": 0.05}),
        record("profile", profile),
    ]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    write_report(records(), tmp_path / "report.html")
    return tmp_path / "report.html"


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    record("bench train", {"rows": [{"x": float("nan"), "y": (1, 2)}]}).write(file)
    assert read_record(file).result == {"rows": [{"x": None, "y": [1, 2]}]}


def test_the_page_fetches_nothing_and_trusts_nothing(page: Path) -> None:
    text = page.read_text().replace(library(), "")  # its addresses are names; a browser tells what is fetched, below
    assert "http://" not in text
    assert "https://" not in text
    assert "<b>ddp" not in text.split('id="data"')[0]
    assert text.count("</script>") == 3
    assert "<!--" not in text


def test_headings_stand_over_their_numbers(page: Path) -> None:
    text = page.read_text()
    assert '<th scope="col"><button type="button">strategy<' in text
    assert '<th scope="col" class="number"><button type="button">step, ms (median)<' in text


def test_every_table_is_beside_it(page: Path) -> None:
    folder = page.with_name("report_files")
    rows = list(csv.DictReader(next(folder.glob("01-*-time.csv")).open()))
    assert [row["strategy"] for row in rows] == ["<b>ddp</b> & <!--<script>", "bucketed"]
    assert len(list(folder.glob("*.csv"))) == 6
    assert len(json.loads((folder / "records.json").read_text())) == 4


@pytest.mark.skipif(chromium() is None, reason="needs Chromium (apt install chromium)")
def test_the_page_works_in_a_browser(page: Path) -> None:
    with Browser() as browser:
        browser.open(page)
        wait_for_charts(browser)
        assert browser.run("document.querySelectorAll('figure svg').length") == browser.run("charts.length")
        assert browser.run("document.querySelectorAll('figure svg path').length") > 100
        first = "document.querySelector('table.sortable tbody tr').cells[0].textContent"
        assert browser.run(first).startswith("<b>ddp")
        browser.run("document.querySelectorAll('table.sortable th button')[1].click()")
        assert browser.run(first) == "bucketed"  # 9.5 before 20: sorted by number
        browser.run("document.querySelectorAll('table.sortable th button')[1].click()")
        assert browser.run(first).startswith("<b>ddp")
        was_dark = browser.run("document.documentElement.classList.contains('dark')")
        browser.run("document.getElementById('theme').click()")
        assert browser.run("document.documentElement.classList.contains('dark')") != was_dark
        narrow_and_choose(browser)
        assert not browser.problems
        assert not browser.fetched


def wait_for_charts(browser: Browser) -> None:
    browser.run("Promise.all(drawn).then(() => true)", awaited=True)


def narrow_and_choose(browser: Browser) -> None:
    """Charts follow the width of the page, their text does not shrink, and the timeline shows what is chosen."""
    browser.call("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=False)
    browser.run("new Promise(done => setTimeout(done, 300))", awaited=True)
    assert browser.run("Math.max(...[...document.querySelectorAll('figure svg')].map(s => s.clientWidth))") < 400
    sizes = "[...document.querySelectorAll('figure svg .role-axis-label text')].map(t => getComputedStyle(t).fontSize)"
    assert browser.run(f"[...new Set({sizes})].join()") == "11px"
    bars = "[...document.querySelectorAll('.wide svg .mark-rect path')].map(p => p.getAttribute('aria-label')).join()"
    before = browser.run(bars)
    choose = (
        "const s = document.querySelector('.wide select'); s.selectedIndex = 1; s.dispatchEvent(new Event('change'))"
    )
    browser.run(choose)
    browser.run("new Promise(done => setTimeout(done, 300))", awaited=True)
    assert browser.run(bars) != before


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_every_colour_can_be_read(theme: int) -> None:
    for role, colours in PALETTE.items():
        if role not in ("paper", "panel", "line"):  # what things stand on, and hairlines
            for ground in ("paper", "panel"):
                assert contrast(colours[theme], PALETTE[ground][theme]) >= 4.5, (role, ground)


def test_equal_losses_are_one_line_and_others_are_told_apart() -> None:
    losses = {name: [2.0, 1.5, 1.2] for name in ("single", "naive", "ddp", "fsdp")}
    others = {"bucketed+topk": [2.0, 1.6, 1.4], "bucketed+powersgd": [2.0, 1.7, 1.3], "local_sgd": [2.0, 1.9, 1.8]}
    made = section(record("demo", {"rows": bench_rows(), "losses": losses | others}))
    (chart,) = (chart for chart in made.charts if chart.title == "Loss")
    names = chart.spec["encoding"]["color"]["scale"]["domain"]
    assert names == ["single = naive = ... = fsdp, 4 equal", *others]
    styles = distinguished(names)
    assert len({(colour, *dash) for colour, dash in styles}) == 4
    assert styles[1][0] == styles[2][0] != styles[3][0]  # relatives share their colour


def test_each_model_has_its_own_axis() -> None:
    rows = [{**row, "parameters": size} for size in (1000, 9_000_000) for row in bench_rows()]
    titles = [chart.title for chart in section(record("bench train", {"rows": rows})).charts]
    assert titles[:2] == ["Step time, 1,000 parameters", "Step time, 9,000,000 parameters"]


STRANGE: list[tuple[str, dict[str, Any]]] = [  # kind, result: each is drawn, with what it has not left out
    ("bench comm", {"rows": []}),
    ("profile", {"diagnoses": [{"shares": {}, "step_ms": 1.0}], "timelines": [], "words": []}),
    ("demo", {"rows": bench_rows(), "losses": {"a": [1.0, None], "b": [1.0, None], "c": [None, 1.0]}}),
    ("bench train", {"rows": [{**row, "parameters": size} for row, size in zip(bench_rows(), (None, 5), strict=True)]}),
    ("bench train", {"rows": [{**row, "label": "var(--nothing) \ud800"} for row in bench_rows()]}),
]
SPOILED: list[tuple[str, dict[str, Any]]] = [  # each is one line that names it
    ("bench train", {"rows": [{**bench_rows()[0], "step_ms": 10**400}]}),
    ("bench train", {"rows": [{**bench_rows()[0], "parameters": "x"}, {**bench_rows()[1], "parameters": 1}]}),
    ("bench train", {"rows": bench_rows(), "sentences": [1]}),
    ("bench scaling", {"points": [{"mode": "strong", "ranks": 0, "speedup": 1, "efficiency": 1}], "serial": 0.0}),
]


@pytest.mark.parametrize(("kind", "result"), STRANGE)
def test_strange_results_are_drawn(kind: str, result: dict[str, Any], tmp_path: Path) -> None:
    assert write_report([record(kind, result)], tmp_path / "report.html")
    made = section(record(kind, result))
    if made.charts:
        draw(made.charts, tmp_path / "x.svg")


@pytest.mark.parametrize(("kind", "result"), SPOILED)
def test_spoiled_results_are_named(kind: str, result: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"of {kind} is not whole"):
        write_report([record(kind, result)], tmp_path / "report.html")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_same_charts_go_into_a_picture(suffix: str, tmp_path: Path) -> None:
    begins = {"png": b"\x89PNG", "svg": b"<svg", "pdf": b"%PDF"}
    for number, made in enumerate(section(record) for record in records()):
        file = tmp_path / f"{number}.{suffix}"
        draw(made.charts, file)
        assert file.read_bytes().startswith(begins[suffix])
        assert b"var(--" not in file.read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name the results to report on"),
        (["/nowhere"], "/nowhere does not exist"),
        (["EMPTY"], "has no results in it"),
        (["OTHER"], "is not a result of lockstep's"),
        (["HALF"], "is not a whole result of lockstep's"),
        (["NOROWS"], "of bench train is not whole (KeyError('rows'))"),
        (["GOOD", "--out", "x.pdf"], "--out x.pdf: name a file that ends in .html"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "half.json").write_text('{"lockstep_record": 1}')
    record("bench train", {}).write(tmp_path / "norows.json")
    records()[1].write(tmp_path / "good.json")
    places = {name.upper(): tmp_path / f"{name}.json" for name in ("other", "half", "norows", "good")}
    places["EMPTY"] = tmp_path / "empty"
    assert main(["report", *(str(places.get(word, word)) for word in words)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1


def test_a_run_that_still_writes_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    record("train", {"ranks": 2}).write(tmp_path / "run.json")
    whole = json.dumps({"kind": "train", "step": 10, "loss": 2.0, "samples_per_s": 5.0})
    again = json.dumps({"kind": "train", "step": 5, "loss": 3.0, "samples_per_s": 5.0})
    (tmp_path / "metrics.jsonl").write_text(f'{whole}\n{again}\n{whole}\n{{"kind": "tr')
    (found,) = gather([tmp_path])
    assert [row["step"] for row in found.result["metrics"]] == [5, 10]
    assert write_report([found], tmp_path / "out" / "report.html")


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1234567, "1,234,567"), (0.5, "0.5"), (12.3456, "12.346"), (1e-5, "1e-05")]
)
def test_numbers_are_readable(value: float, text: str) -> None:
    assert readable(value) == text


def test_a_column_has_its_points_in_one_line() -> None:
    assert decimals([231.3, 90.786, 0.0]) == 1
    assert decimals([0.7, 1.0]) == 3
    assert decimals([12.5, 9.0]) == 2
    assert decimals([1234.5, 900.2]) == 0
    assert decimals([4, 8]) == 0
    assert decimals([9e-5, 7.0]) is None
    assert decimals([0.0, 3e-8, 5e-8]) is None
    assert decimals([0.0009, 0.0004]) is None
    assert decimals([1400.2, 1.4]) is None
    assert decimals([]) is None
