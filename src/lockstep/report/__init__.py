"""One HTML file from any set of results: opens offline, and everything in it is also there as CSV and JSON."""

from lockstep.report.gather import gather
from lockstep.report.page import write_report

__all__ = ["gather", "write_report"]
