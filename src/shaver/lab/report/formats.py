"""The formats of tables: terminal, Markdown, CSV and LaTeX, with the best entry of each column marked."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from shaver.lab.report.tables import Entry, Line, Table

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "×": r"$\times$", "–": "--",
    "−": "$-$", "µ": r"$\mu$",
}  # fmt: skip


def terminal(table: Table, width: int) -> Group:
    """For a console of this width: with errors if they fit, else means, else only the highest sparsities."""
    labelled = sum(
        max(map(len, (head, *(line.labels[i] for line in table.lines)))) + 1 for i, head in enumerate(table.heads)
    )
    first = 0
    for show in (_with_error, lambda entry: entry.text, lambda entry: entry.short or entry.text):
        widths = [
            max(len(column), *(len(show(line.entries[i])) for line in table.lines)) + 1
            for i, column in enumerate(table.columns)
        ]
        if labelled + sum(widths) + 2 <= width or not table.over.startswith("sparsity"):
            break
    else:
        while first < len(widths) - 1 and labelled + sum(widths[first:]) + 2 > width:
            first += 1
    note = table.note
    if show is not _with_error and any(entry.error for line in table.lines for entry in line.entries):
        note = note.replace(" ± standard error", "") + " The files have the standard errors."
    if first:
        note += f" Columns up to {table.columns[first - 1]} do not fit here; the files have them."
    drawn = RichTable(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for head in table.heads:
        drawn.add_column(escape(head), no_wrap=True)
    for column in table.columns[first:]:
        drawn.add_column(escape(column), justify="right", no_wrap=True)
    apart = len({line.labels[0] for line in table.lines}) < len(table.lines)
    for labels, line, begins in _grouped(table.lines):
        if begins and apart:
            drawn.add_section()
        drawn.add_row(*map(escape, labels), *(_styled(show(entry), entry) for entry in line.entries[first:]))
    over = f" over {table.over}" if table.over else ""
    return Group(Text(f"\n{table.title}{over}", style="bold"), drawn, Text(note, style="dim"))


def markdown(table: Table) -> str:
    """A heading, the table and its note; the best of a column is bold, the best of a group in italics."""
    heads = [*table.heads, *table.columns]
    out = [f"**{_md(table.title)}**", "", f"| {' | '.join(map(_md, heads))} |"]
    out.append(f"|{'---|' * len(table.heads)}{'--:|' * len(table.columns)}")
    for labels, line, _ in _grouped(table.lines):
        out.append(f"| {' | '.join([*map(_md, labels), *map(_md_entry, line.entries)])} |")
    return "\n".join([*out, "", _note(table, "bold", "in italics"), ""])


def comma_separated(table: Table) -> str:
    """Every label on every line; the numbers unrounded, each followed by its standard error if any has one."""
    errors = any(entry.spread is not None for line in table.lines for entry in line.entries)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns: Iterable[str] = table.columns
    if errors:
        columns = (name for column in table.columns for name in (column, f"{column} se"))
    writer.writerow([*table.heads, *columns])
    for line in table.lines:
        numbers = ([e.value, e.spread] if errors else [e.value] for e in line.entries)
        writer.writerow([*line.labels, *("" if v is None else v for pair in numbers for v in pair)])
    return text.getvalue()


def latex(table: Table) -> str:
    r"""A ``table`` for ``\usepackage{booktabs,graphicx}``; the best bold, the best of a group underlined.

    It is made narrower where it would be wider than the line.
    """
    count, start = len(table.columns), len(table.heads)
    out = [
        r"% \usepackage{booktabs,graphicx}",
        r"\begin{table}[t]",
        r"\centering",
        rf"\caption{{{_tex(table.title)}. {_tex(_note(table, 'bold', 'underlined'))}}}",
        rf"\label{{tab:{table.name}}}",
        r"\smallskip",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{@{{}}{'l' * start}{'r' * count}@{{}}}}",
        r"\toprule",
    ]
    if table.over:
        out.append(rf"{'& ' * start}\multicolumn{{{count}}}{{c}}{{{_tex(table.over)}}} \\")
        out.append(rf"\cmidrule(l){{{start + 1}-{start + count}}}")
    out += [" & ".join(map(_tex, [*table.heads, *table.columns])) + r" \\", r"\midrule"]
    for labels, line, begins in _grouped(table.lines):
        if begins and start > 1:
            out.append(r"\addlinespace")
        out.append(" & ".join([*map(_tex, labels), *map(_tex_entry, line.entries)]) + r" \\")
    return "\n".join([*out, r"\bottomrule", r"\end{tabular}}", r"\end{table}", ""])


def _grouped(lines: Sequence[Line]) -> Iterator[tuple[Sequence[str], Line, bool]]:
    """Each line with its labels, the first one only where it changes, and whether another group begins with it."""
    before = ""
    for line in lines:
        name, *others = line.labels
        changes = name != before
        yield [name if changes else "", *others], line, changes and line is not lines[0]
        before = name


def _with_error(entry: Entry) -> str:
    return f"{entry.text} ±{entry.error}" if entry.error else entry.text


def _styled(text: str, entry: Entry) -> str:
    return f"[bold green]{text}[/]" if entry.best else f"[green]{text}[/]" if entry.leads else text


def _note(table: Table, best: str, leads: str) -> str:
    """The note, and what the marks that occur mean."""
    entries = [entry for line in table.lines for entry in line.entries]
    note = table.note
    if any(entry.best for entry in entries):
        note += f" Best of a column: {best}."
    if any(entry.leads for entry in entries):
        note += f" Best within its {table.heads[0]}: {leads}."
    return note


def _md(text: str) -> str:
    for character in "\\|*_<`[":
        text = text.replace(character, f"\\{character}")
    return text.replace("\n", " ")


def _md_entry(entry: Entry) -> str:
    mark = "***" if entry.best and entry.leads else "**" if entry.best else "*" if entry.leads else ""
    return f"{mark}{entry.text}{mark}" + (f" ± {entry.error}" if entry.error else "")


def _tex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _tex_entry(entry: Entry) -> str:
    text = _tex(entry.text)
    text = rf"\underline{{{text}}}" if entry.leads else text
    text = rf"\textbf{{{text}}}" if entry.best else text
    return text + (rf" {{\scriptsize$\pm${entry.error}}}" if entry.error else "")
