"""How Sphinx builds these pages: ``make docs`` writes them to ``docs/_build`` and accepts no warning."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

import shaver

# Document callbacks without importing the trainers they belong to, which takes long.
for trainer, base in (("lightning.pytorch", "Callback"), ("transformers", "TrainerCallback")):
    sys.modules[trainer.partition(".")[0]] = ModuleType(trainer.partition(".")[0])
    sys.modules[trainer] = ModuleType(trainer)
    setattr(sys.modules[trainer], base, type(base, (), {"__module__": "builtins"}))
sys.modules["lightning"].pytorch = sys.modules["lightning.pytorch"]  # type: ignore[attr-defined]

project = "shaver"
author = "the shaver contributors"
copyright = "the shaver contributors, MIT licence"
version = release = shaver.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "mathml",  # our own: equations that need no network access
]
source_suffix = {".md": "markdown"}
# README.md lists the pages for readers of the repository; here index.md does.
exclude_patterns = ["_build", "README.md"]

html_theme = "furo"
html_title = f"shaver {release}"
html_static_path = ["_static"]
html_css_files = ["shaver.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
highlight_language = "text"  # plain fences hold shell commands and program output
pygments_style = "friendly"
pygments_dark_style = "native"

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
myst_dmath_double_inline = True
myst_update_mathjax = False  # MathJax is not used

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# Show a class's attributes as a list in its text, not as separate entries.
napoleon_custom_sections = [("Attributes", "params_style")]
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True


def _resolve_face(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Resolve ``shaver.SpaM``, which is documented as ``shaver.spam.SpaM``; references may use either name."""
    if node.get("refdomain") != "py":
        return None
    top, _, rest = node["reftarget"].removeprefix("shaver.").partition(".")
    if top not in shaver._NAMES:
        return None
    target = ".".join(filter(None, (shaver._NAMES[top], top, rest)))
    python = env.get_domain("py")
    return python.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], target, node, contnode)


def _plain_bars(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    r"""Escape bars outside code: |θ| in a docstring is an absolute value, not a substitution."""
    for i, line in enumerate(lines):
        if "|" in line and not line.lstrip().startswith((">>>", "...", "|", "+")):
            parts = line.split("``")
            parts[::2] = [part.replace("\\|", "|").replace("|", "\\|") for part in parts[::2]]
            lines[i] = "``".join(parts)


def _no_type(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Undo Napoleon's reading of "a: b" in an attribute's first line as a type and a text; ours is a sentence."""
    for i, line in enumerate(lines):
        if what in ("attribute", "data", "property") and line.startswith(":type: "):
            del lines[i]
            lines[0] = f"{line.removeprefix(':type: ')}: {lines[0]}"
            return


def setup(app: Any) -> None:
    """Connect the three handlers above."""
    app.connect("autodoc-process-docstring", _no_type, priority=600)  # after napoleon
    app.connect("missing-reference", _resolve_face)
    app.connect("autodoc-process-docstring", _plain_bars)
