"""The page's building blocks as HTML text; everything that comes from data is escaped here."""

import base64
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from shaver.lab.report.frame import Estimate
from shaver.lab.report.names import METHOD_NAMES
from shaver.lab.report.tables import Entry, Table, percent

#: Dimensions that curves can be coloured by.
_COLOURS = {"criterion": "ranking", "prior": "prior", "curvature": "curvature", "stage": "stage", "method": "training"}
#: What the pictures of the demo show; other pictures are named after their files.
_CAPTIONS = {
    "filters": "The weights of each layer: red is positive, blue negative, black removed.",
    "layers": "What remains of each layer: the outputs with at least one weight, and the share of weights removed.",
    "precision": "The prior precision δ learned for the weights of each layer. Weights with a large δ are not needed.",
}


def section(key: str, title: str, text: str, content: str) -> str:
    """A part of the page with its heading."""
    return (
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{escape(title)}</h2>'
        f'<p class="under">{escape(text)}</p>{content}</section>'
    )


def panel(key: str, controls: Sequence[tuple[str, str, str, str]], hint: str) -> str:
    """A plot with its controls; the script fills it."""
    out = []
    for kind, name, label, extra in controls:
        ident = f"{key}-{name}"
        if kind == "chips":
            out.append(f'<fieldset class="control {extra}" id="{ident}"><legend>{escape(label)}</legend></fieldset>')
            continue
        options = "".join(f'<option value="{v}">{t}</option>' for v, t in _COLOURS.items()) if kind == "colour" else ""
        out.append(
            f'<div class="control {extra}"><label class="name" for="{ident}">{escape(label)}</label>'
            f'<select id="{ident}">{options}</select></div>'
        )
    below = f'<p class="hint">{escape(hint)}</p>' if hint else ""
    return (
        f'<div class="panel"><div class="controls">{"".join(out)}</div><div class="plot" id="{key}-plot">'
        f'<noscript><p class="empty">Curves need JavaScript; the tables below have the numbers.</p></noscript></div>'
        f'<ul class="key" id="{key}-key"></ul>{below}</div>'
    )


def card(title: str, criterion: str, reached: Mapping[str, float], failures: Mapping[str, str]) -> str:
    """The summary of an experiment: a meter for each method, and a warning for each of which networks did not learn."""
    rows = "".join(
        f"<dt>{escape(METHOD_NAMES.get(method, method))}</dt>"
        f'<dd class="meter"><i class="{escape(method, quote=True)}" style="width:{100 * share:.2f}%"></i></dd>'
        f'<dd class="number">{percent(share)} %</dd>'
        for method, share in reached.items()
    )
    warnings = "".join(
        f'<p class="warning">{escape(METHOD_NAMES.get(method, method))}: {escape(failure)}</p>'
        for method, failure in failures.items()
    )
    return (
        f'<div class="card"><h3>{escape(title)}</h3><p>pruned by {escape(criterion)}</p><dl>{rows}</dl>{warnings}</div>'
    )


def html_table(table: Table) -> str:
    """A table that scrolls by itself where it is too wide."""
    labels, columns = len(table.heads), len(table.columns)
    head = "".join(f'<th class="label" scope="col">{escape(name)}</th>' for name in table.heads)
    head += "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    over = ""
    if table.over:
        over = f'<tr><td colspan="{labels}"></td><th class="over" colspan="{columns}">{escape(table.over)}</th></tr>'
    body, last = [], None
    for line in table.lines:
        begins = line.labels[0] != last
        last = line.labels[0]
        names = [f'<th scope="row">{escape(name) if begins or i else ""}</th>' for i, name in enumerate(line.labels)]
        body.append(f"<tr{' class=begins' if begins else ''}>{''.join(names)}{''.join(map(_cell, line.entries))}</tr>")
    return (
        f'<h3 class="title">{escape(table.title)}</h3>'
        '<p class="swipe" aria-hidden="true">Scroll sideways for more columns →</p>'
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(table.title, quote=True)}">'
        f'<table class="sheet"><thead>{over}<tr>{head}</tr></thead>'
        f'<tbody>{"".join(body)}</tbody></table></div><p class="note">{escape(table.note)}</p>'
    )


def picture(path: Path) -> str:
    """An SVG file as an image: nothing in it runs, and its ids stay its own."""
    encoded = base64.b64encode(path.read_bytes()).decode()
    caption = escape(_CAPTIONS.get(path.stem, path.stem.replace("-", " ").replace("_", " ")), quote=True)
    image = f'<img alt="{caption}" src="data:image/svg+xml;base64,{encoded}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def bars(rows: Sequence[tuple[str, Estimate, int]], show: Callable[[float], str]) -> str:
    """Horizontal bars: label, mean with error as ``show`` writes them, colour."""
    longest = max(found.mean for _, found, _ in rows)
    out = []
    for label, found, slot in rows:
        error = "" if found.error is None else f" ± {show(found.error)}"
        out.append(
            f'<dt>{escape(label)}</dt><dd><i style="width:calc((100% - 9.5rem) * '
            f'{found.mean / longest:.4f});background:var(--k{slot})"></i>'
            f"{escape(show(found.mean) + error)}</dd>"
        )
    return f'<dl class="bars">{"".join(out)}</dl>'


def facts(values: Mapping[str, Any]) -> str:
    """Names and values; a nested map becomes one line."""

    def plain(value: Any) -> str:
        if isinstance(value, Mapping):
            return ", ".join(f"{key} {plain(inner)}" for key, inner in value.items() if inner not in (None, "", [], {}))
        if isinstance(value, list | tuple):
            return ", ".join(map(plain, value))
        return str(value)

    rows = (
        f"<dt>{escape(str(key).replace('_', ' '))}</dt><dd>{escape(plain(value))}</dd>"
        for key, value in values.items()
        if value not in (None, "", [], {})
    )
    return f'<dl class="facts">{"".join(rows)}</dl>'


def _cell(entry: Entry) -> str:
    names = " ".join(name for name, is_so in (("best", entry.best), ("leads", entry.leads)) if is_so)
    marks = f' class="{names}"' if names else ""
    error = f"<small>±{escape(entry.error)}</small>" if entry.error else ""
    return f"<td{marks}>{escape(entry.text)}{error}</td>"
