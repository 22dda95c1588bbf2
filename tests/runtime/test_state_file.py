"""Files of plain values and tensors: what was written is read, at once or not at all, and damage is refused."""

from __future__ import annotations

import contextlib
import fcntl
import http
import json
import os
import random
import resource
import signal
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save_file

from graphopt import CheckpointError, InputError
from graphopt.runtime.state_file import FORMAT, VERSION, digest_of, holds, read_state, write_state
from tests.forked import ended
from tests.runtime.comparing import same

TREE = {
    "numbers": [0.1, -0.0, float("nan"), float("inf"), 2**70, True, None],
    "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 4)}, 1: {}},
    "tuple": ((), ("a", 1.5), torch.Size([2])),
    "tensors": [torch.zeros(0, 2), torch.tensor(True), torch.randn(4, 4).to(torch.bfloat16).t(), torch.arange(4)[1:3]],
    "text": 'ä " \\ \ud800 \n',
    ("a", 1): torch.randn(2).expand(3, 2),
}

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
tensors = st.sampled_from([torch.zeros(0), torch.ones(2, 3), torch.tensor(1.5, dtype=torch.float64), torch.tensor([1, 2])])
keys = st.text(max_size=5) | st.integers() | st.tuples(st.text(max_size=3), st.integers())
trees = st.recursive(
    leaves | tensors,
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=10,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.safetensors"


def test_what_was_written_is_read(path: Path) -> None:
    write_state(path, TREE)
    found = read_state(path)
    assert same(found, {**TREE, "tuple": ((), ("a", 1.5), (2,))})
    assert [t.dtype for t in found["tensors"]] == [t.dtype for t in TREE["tensors"]]  # type: ignore[index]
    assert os.listdir(path.parent) == [path.name]


@given(tree=trees)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_any_tree_is_read_as_it_was_written(tree: Any, path: Path) -> None:
    write_state(path, tree)
    assert same(read_state(path), tree)


def test_tensors_that_share_memory_do_not_when_they_are_read(path: Path) -> None:
    shared = torch.ones(4)
    write_state(path, [shared, shared, shared[:2]])
    one, other, part = read_state(path)
    one.zero_()
    assert other.tolist() == [1, 1, 1, 1]
    assert part.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        (object(), "of type object"),
        (torch.ones(2).to_sparse(), "a torch.sparse_coo tensor"),
        (torch.ones(2, dtype=torch.complex128), "tensor of torch.complex128"),
        (torch.ones(2, device="meta"), "without memory"),
        ({3, 4}, "of type set"),
        ({b"a": 1}, "has the key b'a'"),
    ],
)
def test_what_a_file_cannot_hold_is_named_and_nothing_is_written(entry: Any, what: str, path: Path) -> None:
    with pytest.raises(InputError, match=rf"state\.3\.entry.* {what}"):
        write_state(path, {"state": {3: {"entry": entry}}})
    assert os.listdir(path.parent) == []


def test_what_a_file_would_give_back_as_something_else_it_does_not_hold() -> None:
    plain = [None, True, 1, 2.5, "a", (torch.ones(2), [{"b": torch.zeros(1, dtype=torch.bool)}]), {3: ()}]
    assert holds(plain)
    for other in ({1, 2}, slice(0, 2), torch.float32, torch.device("cpu"), http.HTTPStatus.OK, OrderedDict(a=1)):
        assert not holds([*plain, {"mode": other}])


def test_a_link_stays_a_link_and_the_users_mask_decides_who_reads(path: Path) -> None:
    (path.parent / "there").symlink_to(path)
    before = os.umask(0o027)
    try:
        write_state(path.parent / "there", [1])
    finally:
        os.umask(before)
    assert (path.parent / "there").is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert read_state(path) == [1]


@pytest.mark.parametrize("call", ["os.replace", "os.fsync", "builtins.open"])
def test_a_write_that_fails_leaves_what_was_there(call: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(path, ["before"])

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(call, failing)
    with pytest.raises(CheckpointError, match="could not be written to .*state.safetensors.*No space left.*Make room"):
        write_state(path, ["after", torch.ones(9)])
    monkeypatch.undo()
    assert read_state(path) == ["before"]
    assert os.listdir(path.parent) == [path.name]


def test_a_folder_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file or directory"):
        write_state(tmp_path / "nowhere" / "state", [1])


def killed_again_and_again(path: Path) -> None:
    """Processes that write are killed, and what they leave is whole; some of them get to write something."""
    write_state(path, {"count": 0, "tensor": torch.zeros(500_000)})
    seen = set()
    for _ in range(10):
        child = os.fork()
        if not child:
            count = read_state(path)["count"]
            while True:
                count += 1
                write_state(path, {"count": count, "tensor": torch.full((500_000,), float(count))})
        time.sleep(random.uniform(0.01, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        state = read_state(path)
        assert bool((state["tensor"] == state["count"]).all()), "half of a file"
        seen.add(state["count"])
    assert len(seen) > 1


def test_a_full_disk_leaves_what_was_there(path: Path) -> None:
    write_state(path, ["before"])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="could not be written.*File too large"):
            write_state(path, ["after", torch.ones(1_000_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_state(path) == ["before"]
    assert os.listdir(path.parent) == [path.name]


def test_a_process_killed_at_any_moment_leaves_a_file_that_loads(path: Path) -> None:
    assert ended(killed_again_and_again, path) == 0
    abandoned = [n for n in path.parent.iterdir() if n.name.endswith(".part")]
    assert len(abandoned) <= 1, "a write leaves what processes before it had left"
    write_state(path, ["after"])
    assert os.listdir(path.parent) == [path.name]


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_writes_is_not(path: Path) -> None:
    left, written, other = (path.parent / name for name in (f".{path.name}.1.part", f".{path.name}.2.part", ".other.1.part"))
    for file in (left, written, other):
        file.write_bytes(b"half")
    with open(written, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_state(path, [1])
        assert sorted(os.listdir(path.parent)) == sorted([path.name, written.name, other.name])
    write_state(path, [2])
    assert sorted(os.listdir(path.parent)) == sorted([path.name, other.name])


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "circle"])
def test_what_is_no_regular_file_is_refused_and_stays(kind: str, path: Path) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "circle":
        path.symlink_to(path)
    else:
        path.symlink_to("/dev/null")
    before = os.lstat(path)
    for call in (lambda: write_state(path, [1]), lambda: read_state(path)):
        with pytest.raises(InputError, match="give another path|Give another path"):
            call()
    assert (os.lstat(path).st_ino, os.lstat(path).st_mode) == (before.st_ino, before.st_mode)
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("path", [b"state", None, 3, "a\0b", ["state"]])
def test_what_is_no_path_is_refused(path: Any) -> None:
    for call in (lambda: write_state(path, [1]), lambda: read_state(path)):
        with pytest.raises(InputError, match="is no path|leads to no file"):
            call()


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
def test_damage_anywhere_is_refused(data: st.DataObject, path: Path) -> None:
    write_state(path, TREE)
    good, content = read_state(path), bytearray(path.read_bytes())
    start = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["truncated", "changed", "removed", "inserted"]))
    if kind == "truncated":
        del content[start:]
    elif kind == "changed":
        content[start] = data.draw(st.integers(0, 255))
    elif kind == "removed":
        del content[start : start + data.draw(st.integers(1, 64))]
    else:
        content[start:start] = data.draw(st.binary(min_size=1, max_size=64))
    path.write_bytes(content)
    with contextlib.suppress(InputError):
        assert same(read_state(path), good)  # the very same byte, or white space in a header


@given(structure=st.recursive(
    leaves | st.just({"tensor": "t"}),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["dict", "tuple", "tensor", "number", "other"]), inner, max_size=2),
    max_leaves=8,
))  # fmt: skip
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
def test_any_other_structure_is_refused_or_read(structure: Any, path: Path) -> None:
    write_with(path, json.dumps(structure))
    with contextlib.suppress(InputError):
        write_state(path, read_state(path))  # it was a structure after all


@pytest.mark.parametrize("structure", ["", "{", "[" * 100_000, '{"tensor": "t", "tuple": []}', "[1, 2", "9" * 10_000])
def test_what_is_no_json_is_refused(structure: str, path: Path) -> None:
    write_with(path, structure)
    with pytest.raises(InputError, match="is damaged"):
        read_state(path)


def write_with(path: Path, structure: str, **metadata: str) -> None:
    """A file whose digest is right, whatever it holds."""
    tensors = {"t": torch.ones(2)}
    held = {"format": FORMAT, "version": str(VERSION), "state": structure, "sha256": digest_of(structure, tensors)}
    save_file(tensors, path, {**held, **metadata})


def test_files_of_others_are_refused_with_the_reason(path: Path) -> None:
    with pytest.raises(InputError, match="no state can be read from .*No such file"):
        read_state(path)
    with pytest.raises(InputError, match="is a folder"):
        read_state(path.parent)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="is damaged or no safetensors file"):
        read_state(path)
    torch.save({"a": torch.ones(2)}, path)
    with pytest.raises(InputError, match="is damaged or no safetensors file"):
        read_state(path)
    for metadata in (None, {"format": "pt"}):
        save_file({"weight": torch.ones(2)}, path, metadata)
        with pytest.raises(InputError, match=r"something else.*load_state_dict"):
            read_state(path)
    write_with(path, "[]", version=str(VERSION + 1))
    with pytest.raises(InputError, match=r"a newer graphopt wrote it.*Update graphopt"):
        read_state(path)
    write_with(path, "[]", version="1")
    with pytest.raises(InputError, match=r"version '1': an older graphopt wrote it.*Finish that run"):
        read_state(path)
    write_with(path, "[]", version="one")
    with pytest.raises(InputError, match="version 'one': there is none such"):
        read_state(path)
    write_with(path, "[]")
    with pytest.raises(InputError, match="it holds 't', which belongs to nothing"):
        read_state(path)
