"""What ``import shaver`` offers, and what it costs."""

import subprocess
import sys

import pytest

import shaver


@pytest.mark.parametrize("name", shaver.__all__)
def test_every_public_name_is_there(name):
    assert getattr(shaver, name) is not None


def test_the_rooms_that_the_guides_name_are_attributes():
    code = "import shaver; shaver.testing.check_rule, shaver.settings.PAPER, shaver.lab.get_recipe, shaver.integrations"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_is_cheap_and_names_come_when_used():
    code = """
import sys, shaver
assert not {"torch", "numpy", "rich", "sklearn", "matplotlib"} & set(sys.modules), "import shaver loads too much"
assert set(shaver.__all__) <= set(dir(shaver))
shaver.fit
assert "torch" in sys.modules
heavy = {"matplotlib", "sklearn", "pandas", "tensorboard", "torch_pruning"} & set(sys.modules)
assert not heavy, f"optional packages were loaded: {heavy}"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'prun'"):
        shaver.prun  # noqa: B018
