"""The documentation cannot go stale: what is generated matches the code, what is linked is there, the site builds."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser, chromium

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md"), *(DOCS / "results").glob("*.md")])


def loaded(name: str) -> Any:
    """A script of docs/."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(text: str) -> list[str]:
    """Without what another width or release of the help's printer would change."""
    return re.sub(r"[─│╭╮╰╯-]{2,}", " ", text).split()


@pytest.mark.parametrize("name", ["commands.md", "configs.md", "learn.md"])
def test_what_is_generated_matches_the_code(name: str) -> None:
    made = loaded("make_reference").PAGES[name]()
    assert words(made) == words((DOCS / name).read_text()), "run: python docs/make_reference.py"


def test_what_is_marked_is_computed_or_included(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    script = loaded("fill_pages")
    assert len(script.pages()) >= 6
    for page in script.pages():
        assert (DOCS / page).read_text() == script.filled(page), f"{page}: python docs/fill_pages.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"(?m)^#+ (.+)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


GENERATED = ("commands.md", "configs.md", "learn.md", "api.md")
FIGURE = re.compile(r"\d\s?(?:%|(?:ms|s|us|MB|GB|KiB|MiB|GiB|Gbit/s|GB/s|tokens/s|samples/s)(?![\w/]))")
NO_RESULTS = {  # sections with figures that nobody has measured: what a word means, what a default is
    "measuring.md: bench train": "the interval and the threshold of a statement",
    "planning.md: A machine file": "an example of a file",
    "training.md: Training": "an example of a line",
    "planning.md: What it does not know": "assumptions",
}


def sections(page: Path) -> dict[str, str]:
    """Heading -> what stands below it."""
    found, title = dict[str, str](), ""
    for part in re.split(r"(```.*?```)", page.read_text(), flags=re.S):
        if part.startswith("```"):
            found[title] = found.get(title, "") + part
            continue
        for line in part.splitlines(keepends=True):
            if line.startswith("#"):
                title = line.strip("# \n")
            found[title] = found.get(title, "") + line
    return found


@pytest.mark.parametrize("page", [p for p in DOCS.glob("*.md") if p.name not in GENERATED], ids=lambda page: page.name)
def test_figures_say_where_they_come_from(page: Path) -> None:
    """Measured (machine, command, date), derived, or reported (date), in every section that has some."""
    for title, text in sections(page).items():
        if len(FIGURE.findall(text)) < 3 or f"{page.name}: {title}" in NO_RESULTS:
            continue
        marks = {mark.lower() for mark in re.findall(r"\*(measured|derived|reported)\*", text, flags=re.I)}
        assert marks, f"{page.name}, {title}: are its figures measured, derived or reported?"
        if marks - {"derived"}:
            assert re.search(r"20\d\d-\d\d", text), f"{page.name}, {title}: since when?"
        if "measured" in marks:
            assert re.search(r"`(?:lockstep |python|run_on_ranks)|results/|\$ lockstep", text), f"{title}: by what?"


def test_the_site_has_every_page() -> None:
    listed = (DOCS / "index.md").read_text()
    for page in DOCS.glob("*.md"):
        assert page.stem == "index" or re.search(rf"(?m)^{page.stem}$", listed), f"{page.name} is on no shelf"


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    copy = tmp_path / "docs"
    shutil.copytree(DOCS, copy, ignore=shutil.ignore_patterns("lessons", "_live"))
    how = ["-q", "-W", "--keep-going", "-b", "html"]
    command = [sys.executable, "-m", "sphinx", *how, str(copy), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 35
    for page in pages:
        loaded = re.findall(r'(?:src|href)="(https?:[^"]+)"', page.read_text())
        fetched = [url for url in loaded if url.endswith((".js", ".css", ".woff", ".woff2"))]
        assert not fetched, f"{page.name} loads {fetched[0]} from elsewhere"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = loaded("make_live")
    module.LIVE = tmp_path_factory.mktemp("live")
    module.write()
    return Path(module.LIVE)


@pytest.mark.skipif(chromium() is None, reason="there is no Chromium here")
@pytest.mark.parametrize(
    ("page", "move", "least"),
    [
        ("ring.html", "on.click()", 16),
        ("experts.html", "on.click()", 40),
        ("overlap.html", "slider.value = 7; slider.oninput()", 5),
        ("zero.html", "slider.value = 6; slider.oninput()", 20),
        ("schedules.html", 'document.getElementById("back").click()', 100),
    ],
)
def test_a_live_page_moves(live: Path, page: str, move: str, least: int) -> None:
    said = '[...document.querySelectorAll("p, svg text")].map(e => e.textContent).join(" ")'
    with Browser() as browser:
        browser.open(live / page)
        assert browser.run('document.querySelectorAll("svg rect").length') >= least
        before = browser.run(said)
        browser.run(f"{{ {move} }}")
        assert browser.run(said) != before
        assert browser.problems == []
        assert browser.fetched == []


def test_the_live_buckets_have_a_best_size() -> None:
    """Too small: latency; too large: nothing can start in time."""
    exposed = [loaded("make_live").overlap(cap)["exposed"] for cap in (0, 8, 12, 16, 24, 32, 48, 96)]
    best = exposed.index(min(exposed))
    assert 0 < best < len(exposed) - 1
    assert exposed[-1] > 2 * min(exposed)


def test_the_live_ring_sends_what_the_law_says() -> None:
    module = loaded("make_live")
    ring = module.played("ring", 4)
    assert ring["turns"] == 6
    for rank in range(4):
        assert sum(m["elements"] for m in ring["messages"] if m["from"] == rank) == 6  # 2(n-1) parts of 4
