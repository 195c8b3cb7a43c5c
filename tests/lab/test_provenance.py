"""The version of the code behind a result: it changes with every module that a cell runs, and with no other."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shaver
from shaver.lab.recipes.grid import cells_of
from shaver.lab.recipes.recipe import Stage
from shaver.lab.run import provenance
from tests.lab.test_runner import FEW, recipe

HOUSE = Path(shaver.__file__).parent


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the source that can be changed; returns the version with something appended to a file."""
    house = tmp_path / "shaver"
    shutil.copytree(HOUSE, house, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(shaver, "__file__", str(house / "__init__.py"))

    def version_with(file=None, text="\nx_new = 1\n", of="cell"):
        provenance.code_version.cache_clear()
        if file is None:
            return provenance.code_version(of)
        before = (house / file).read_text(encoding="utf-8")
        (house / file).write_text(before + text, encoding="utf-8")
        try:
            return provenance.code_version(of)
        finally:
            (house / file).write_text(before, encoding="utf-8")

    yield version_with
    provenance.code_version.cache_clear()


def loaded_by_cells(tmp_path):
    """The modules of this package that a process has loaded after it ran a cell of each kind."""
    stages = (FEW, Stage("finetuned", ("opd",), (0.9,), epochs=1), Stage("structured", ("opd",), (0.5,)))
    folders = []
    for cell in cells_of(recipe(methods=("spam",), stages=stages)):
        folders.append(tmp_path / cell.key)
        folders[-1].mkdir()
        (folders[-1] / "config.json").write_text(json.dumps(cell.as_dict()))
    code = (
        "import json, sys\nfrom shaver.lab.run.cell import run_cell\n"
        f"for folder in {list(map(str, folders))!r}: run_cell(folder, {str(tmp_path / 'networks')!r})\n"
        "print(json.dumps([name for name in sys.modules if name.partition('.')[0] == 'shaver']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_every_module_that_a_cell_loads_counts(tmp_path):
    assert loaded_by_cells(tmp_path) <= provenance.imported_modules("shaver.lab.run.cell").keys()


@pytest.mark.parametrize("of", ["training", "cell"])
def test_a_change_of_any_module_behind_a_result_changes_its_version(copied, of):
    version = copied(of=of)
    for name, path in provenance.imported_modules(provenance._STARTS[of]).items():
        file = path.relative_to(Path(shaver.__file__).parent)
        assert copied(file, of=of) != version, name
    assert copied(of=of) == version


@pytest.mark.parametrize(
    "file", ["lab/report/figures.py", "lab/report/page/build.py", "commands/main.py", "lab/run/progress.py"]
)
def test_reports_and_commands_do_not_count(copied, file):
    assert copied(file) == copied()


def test_what_is_said_about_the_code_does_not_count(copied):
    assert copied("spam.py", "\n# a comment\n") == copied()
    assert copied("lab/run/results.py", '\ndef f() -> None:\n    """Says."""\n') == copied(
        "lab/run/results.py", '\ndef f() -> None:\n    """Says more."""\n'
    )


def test_versions_and_machine_are_told():
    assert provenance.versions()["shaver"] == shaver.__version__
    assert provenance.machine()["cores"] >= 1
