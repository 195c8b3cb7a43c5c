"""Files are complete or absent, never pickled, and come back exactly."""

import errno
import json
import math
import os
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shaver import io


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file.txt"
    io.write_text(path, "old")

    def interrupted():
        with io.atomic_path(path) as temporary:
            temporary.write_text("new, half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device \(the file was not written\): '.*file\.txt'") as raised:
        interrupted()
    assert raised.value.errno == errno.ENOSPC
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file.txt"]


def test_an_interrupt_cleans_up_as_well(tmp_path):
    with pytest.raises(KeyboardInterrupt), io.atomic_path(tmp_path / "file"):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_the_file_does_not_appear_before_it_is_complete(tmp_path):
    path = tmp_path / "deep" / "er" / "file"
    with io.atomic_path(path) as temporary:
        temporary.write_bytes(b"x")
        assert not path.exists()
        assert temporary.parent == path.parent, "a rename is atomic within one file system only"
    assert path.read_bytes() == b"x"


def test_permissions_follow_the_users_mask(tmp_path):
    before = os.umask(0o027)
    try:
        io.write_text(tmp_path / "file", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_json_is_strict_and_readable(tmp_path):
    io.write_json(tmp_path / "a.json", {"δ": [1, 2.5, None, True]})
    assert io.read_json(tmp_path / "a.json") == {"δ": [1, 2.5, None, True]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        io.write_json(tmp_path / "b.json", {"x": math.nan})
    assert not (tmp_path / "b.json").exists()
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(ValueError, match=r"c\.json is not valid JSON"):
        io.read_json(tmp_path / "c.json")


def test_tensors_of_every_kind_come_back_bit_by_bit(tmp_path):
    base = torch.randn(4, 6)
    tensors = {
        "transposed": base.t(),
        "slice": base[1:3, ::2],
        "same memory": base,
        "half": base.bfloat16(),
        "double": base.double(),
        "bool": base > 0,
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 5),
        "nan": torch.tensor([math.nan, math.inf, -0.0]),
        "parameter": torch.nn.Parameter(base),
    }
    io.save_tensors(tmp_path / "t.safetensors", tensors)
    loaded = io.load_tensors(tmp_path / "t.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert loaded[name].shape == tensor.shape, name
        assert torch.equal(
            loaded[name].contiguous().view(-1).view(torch.uint8) if tensor.ndim else loaded[name],
            tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.ndim else tensor,
        ), name


@pytest.mark.parametrize("content", [b"", b"not a safetensors file at all", b"\xff" * 64])
def test_a_foreign_file_is_named(tmp_path, content):
    path = tmp_path / "foreign.safetensors"
    path.write_bytes(content)
    for load in (io.load_tensors, io.load_state):
        with pytest.raises(ValueError, match=r"foreign\.safetensors is not a readable"):
            load(path)


def test_a_truncated_file_is_named(tmp_path):
    path = tmp_path / "cut.safetensors"
    io.save_state(path, {"a": torch.randn(100)})
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"cut\.safetensors"):
        io.load_state(path)


def test_tensors_without_a_state_are_told_apart(tmp_path):
    io.save_tensors(tmp_path / "t.safetensors", {"a": torch.ones(1)})
    with pytest.raises(ValueError, match="without a saved state"):
        io.load_state(tmp_path / "t.safetensors")


def test_what_would_need_pickle_is_refused_by_its_place():
    with pytest.raises(TypeError, match=r"^a\.1\.b holds a set, which cannot be saved without pickle"):
        io.pack({"a": [1, {"b": {1, 2}}]})


_PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
_NESTED = st.recursive(
    _PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


def _same(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


@settings(max_examples=60, deadline=None)
@given(state=_NESTED)
def test_any_nested_state_comes_back_with_its_types(state):
    tensors, rest = io.pack(state)
    assert not tensors
    assert _same(io.unpack(tensors, json.loads(json.dumps(rest))), state)


def test_an_optimizers_state_comes_back_through_a_file(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    io.save_state(tmp_path / "o.safetensors", optimizer.state_dict())
    loaded = io.load_state(tmp_path / "o.safetensors")
    original = optimizer.state_dict()
    assert loaded["param_groups"] == original["param_groups"]
    assert loaded["state"].keys() == original["state"].keys() == {0, 1}
    for key, tensor in original["state"][0].items():
        assert torch.equal(loaded["state"][0][key], tensor)


def test_nothing_in_a_state_file_is_executed(tmp_path):
    """A state that looks like the tags of the format stays data."""
    for state in ({"$tensor": "x"}, {"$tuple": [1]}, {"$dict": [["a", 1]]}, [{"$float": "zz"}]):
        io.save_state(tmp_path / "s.safetensors", state)
        assert io.load_state(tmp_path / "s.safetensors") == state
    source = Path(io.__file__).read_text()
    assert "import pickle" not in source
    assert "torch.load" not in source


def test_names_that_meet_in_one_path_do_not_overwrite_each_other(tmp_path):
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, 0: torch.full((1,), 2.0), "0": torch.full((1,), 3.0)}
    io.save_state(tmp_path / "s.safetensors", state)
    loaded = io.load_state(tmp_path / "s.safetensors")
    assert [float(loaded["a.b"]), float(loaded["a"]["b"]), float(loaded[0]), float(loaded["0"])] == [0, 1, 2, 3]


def test_a_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "notes").write_text("precious")
    for place in ("notes/a.json", "notes/deeper/a.json"):
        with pytest.raises(NotADirectoryError, match=r"this is a file, but a folder is needed: '.*notes'"):
            io.write_json(tmp_path / place, 1)
    assert (tmp_path / "notes").read_text() == "precious"
    with pytest.raises(TypeError, match="is given by its path, not by 3"):
        io.check_folder(3)


def test_deeply_nested_files_are_refused_in_words(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        io.read_json(path)
    deep = json.dumps({"$tuple": []})
    state = deep[:-2] + (deep[:-2] * 5000) + "]}" * 5001
    io.save_tensors(tmp_path / "deep", {}, {"state": state, "sha256": io.digest({}, state)})
    with pytest.raises(ValueError, match="nested too deeply"):
        io.load_state(tmp_path / "deep")


def test_every_flipped_bit_of_a_state_is_noticed(tmp_path):
    """Of a state file nothing but the padding of its header may differ."""
    path = tmp_path / "state"
    state = {"weights": torch.arange(5.0), "rate": 0.1, "names": ["a", "b"], "step": 7}
    io.save_state(path, state)
    content = path.read_bytes()
    taken = []
    for place in range(len(content)):
        for bit in (0, 6):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            path.write_bytes(bytes(damaged))
            try:
                again = io.load_state(path)
            except ValueError:
                continue
            taken.append(chr(content[place]))
            assert torch.equal(again["weights"], state["weights"])
            assert {**again, "weights": 0} == {**state, "weights": 0}
    assert set(taken) <= {" "}


def test_a_state_that_another_program_wrote_is_refused(tmp_path):
    for state in (
        '{"$tensor": "missing"}',
        '{"$evil": 1}',
        '{"a": 1, "b": 2}',
        '{"$float": "x"}',
        '{"$dict": [1]}',
        "{",
    ):
        io.save_tensors(tmp_path / "odd", {}, {"state": state, "sha256": io.digest({}, state)})
        with pytest.raises(ValueError, match="another program wrote it"):
            io.load_state(tmp_path / "odd")
