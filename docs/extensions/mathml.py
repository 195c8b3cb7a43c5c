"""Renders equations as MathML, which browsers draw without a script, network access or TeX.

The conversion is part of docutils, which Sphinx needs anyway.
"""

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

_log = logging.getLogger(__name__)


def _mathml(node: Any, *, block: bool) -> str:
    try:
        return tex2mathml(node.astext(), as_block=block)
    except MathError as error:  # a warning, which stops `make docs`
        _log.warning("cannot convert %r to MathML: %s", node.astext(), error, location=node)
        return f"<code>{node.astext()}</code>"


def inline(self: Any, node: nodes.math) -> None:
    """An equation within a line."""
    self.body.append(_mathml(node, block=False))
    raise nodes.SkipNode


def display(self: Any, node: nodes.math_block) -> None:
    """An equation of its own, with its number if it has one."""
    self.body.append(self.starttag(node, "div", CLASS="math"))
    if node["number"]:
        self.body.append(f'<span class="eqno">({node["number"]})')
        self.add_permalink_ref(node, "Link to this equation")
        self.body.append("</span>")
    self.body.append(_mathml(node, block=True) + "</div>")
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Offer ``html_math_renderer = "mathml"``."""
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
