"""`lockstep report`."""

from dataclasses import dataclass
from pathlib import Path

from lockstep.cli.parsing import check_output, parse
from lockstep.errors import UserError
from lockstep.report import gather, write_report
from lockstep.words import counted


@dataclass
class ReportArguments:
    """Put any set of results into one HTML file that opens offline; every table and all data lie beside it.

    Results are files that --json of bench train, bench comm and bench scaling wrote, and folders: of train, profile
    and demo, or with any of those in them. They come first.

    For example:

    lockstep report runs/ --out report.html

    lockstep report bench.json scaling.json runs/gpt runs/profile --title "GPT on two machines"
    """

    out: str = "report.html"
    """The file to write; the CSV and JSON files go to a folder beside it: report_files for report.html."""
    title: str = "Lockstep report"


def main(argv: list[str]) -> int:
    places = []
    while argv and not argv[0].startswith("-"):
        places.append(Path(argv[0]))
        argv = argv[1:]
    arguments = parse(ReportArguments, argv, "report")
    if not places:
        raise UserError("name the results to report on: lockstep report runs/ bench.json --out report.html")
    out = Path(arguments.out)
    if out.is_dir() or out.suffix not in (".html", ".htm"):
        raise UserError(f"--out {out}: name a file that ends in .html")
    check_output("--out", arguments.out)
    records = gather(places)
    written = write_report(records, out, arguments.title)
    results = counted(len(records), "result")
    print(f"{out}: {results}; every table as CSV and all data as JSON are in {written[-1].parent}")
    return 0
