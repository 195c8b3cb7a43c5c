"""CONTRIBUTING.md says what the design page says, and its code runs."""

import re

import shaver
import shaver.testing
from shaver.criteria import registry
from tests.docs.rooms import CONTRIBUTING, DESIGN, table


def test_the_table_of_rooms_is_that_of_the_design_page():
    assert table(CONTRIBUTING) == table(DESIGN), "python -m tests.docs.rooms copies it"


def test_the_example_of_a_criterion_runs(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTER", dict(registry._REGISTER))
    (code,) = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, "CONTRIBUTING.md", "exec"), {"shaver": shaver})
    assert "prior-energy" in shaver.criteria.names()
