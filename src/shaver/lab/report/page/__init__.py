"""The report as one HTML page: readable offline, on a phone, printed, in light and dark."""

from shaver.lab.report.page.build import LIMIT, RunFolder, render_page

__all__ = ["LIMIT", "RunFolder", "render_page"]
