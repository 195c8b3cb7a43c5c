"""``make docs`` succeeds: no warning, equations that need no network, nothing fetched from outside."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, str]:
    """The built pages by name."""
    for needed in ("sphinx", "furo", "myst_parser", "sphinx_copybutton"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(folder / "trees")]
    done = subprocess.run(
        [*command, str(DOCS), str(folder / "html")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    html = folder / "html"
    return {str(path.relative_to(html)): path.read_text(encoding="utf-8") for path in html.rglob("*.html")}


def test_equations_are_in_the_page_itself(pages):
    source = (DOCS / "method.md").read_text(encoding="utf-8")
    assert pages["method.html"].count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') == len(
        re.findall(r"^ *\$\$$.*?^ *\$\$", source, re.MULTILINE | re.DOTALL)
    )


def test_no_page_fetches_anything_from_outside(pages):
    for name, text in pages.items():
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]+)"|<link[^>]* href="([^"]+)"', text)
        outside = [a or b for a, b in loaded if re.match(r"(https?:)?//", a or b)]
        assert not outside, f"{name} loads {outside}"


def test_names_of_the_face_lead_to_their_rooms(pages):
    assert 'href="spam.html#shaver.spam.SpaM"' in pages["api/index.html"]
    assert 'href="../api/criteria.html#shaver.criteria.Given"' in pages["guides/extending.html"]
