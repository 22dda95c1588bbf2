"""One file for a tree of plain values and tensors: safetensors, with the structure as JSON in its metadata. No pickle.

A file appears at once or not at all: it is written beside its place, flushed to the disk and renamed. A digest of everything that
it holds is kept in it, so that damage is noticed before anything is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import math
import os
import stat
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from graphopt.compat import pytree
from graphopt.errors import CheckpointError, InputError

FORMAT, VERSION = "graphopt state", 10

MOST_BYTES_OF_STRUCTURE = 90_000_000
"""Safetensors reads no header of more than 100 MB."""

_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16",
    torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL",
}  # fmt: skip


class OtherVersion(InputError):
    """A state that another version of graphopt wrote, which this one cannot read."""


def write_state(path: str | os.PathLike[str], tree: Any) -> None:
    """Write `tree` to `path` in place of what is there.

    A process that is killed meanwhile leaves what was there, and a file `.NAME.*.part` beside it, which the next write removes.

    Args:
        tree: None, booleans, numbers, texts and tensors, in lists, tuples and dicts.
    Raises:
        InputError: an entry is something else; names it. Or `path` is none, or that of a folder, a device, a pipe or a socket.
            Nothing is written then.
        CheckpointError: the file could not be written; what was there is as it was.
    """
    target = _regular(path)
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_encoded(tree, "", tensors), allow_nan=False)
    if len(structure) > MOST_BYTES_OF_STRUCTURE:
        raise InputError(f"the state has {len(structure):,} bytes beside its tensors, more than a safetensors file can hold.")
    tensors = {name: tensor.cpu().resolve_conj().resolve_neg().contiguous() for name, tensor in tensors.items()}
    metadata = {"format": FORMAT, "version": str(VERSION), "state": structure, "sha256": digest_of(structure, tensors)}
    try:
        with _replacing(target) as file:
            _write(file, tensors, metadata)
    except (OSError, MemoryError) as error:
        raise CheckpointError(
            f"the state could not be written to {path}, and what was there is as it was: {error}. Make room there, or save to "
            "another folder."
        ) from error


def read_state(path: str | os.PathLike[str]) -> Any:
    """The tree that `write_state` wrote.

    Raises:
        InputError: there is no such file, or it is damaged, of another kind, or of a newer version.
    """
    file_path = _regular(path)
    damaged = f"{path} is damaged or no safetensors file"
    try:
        with safe_open(file_path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            structure = _checked_kind(path, metadata)
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  not a mapping
        if metadata.get("sha256") != digest_of(structure, tensors):
            raise InputError(f"{path} is damaged: its digest is not that of its content. Use an earlier checkpoint.")
        tree = _decoded(json.loads(structure), tensors)
    except InputError:
        raise
    except (FileNotFoundError, PermissionError) as error:
        raise InputError(f"no state can be read from {path}: {error}. Give a file that save_state() wrote.") from error
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError, MemoryError) as error:
        raise InputError(f"{damaged}: {error}. Use an earlier checkpoint.") from error
    if tensors:
        raise InputError(f"{damaged}: it holds {next(iter(tensors))!r}, which belongs to nothing. Use an earlier checkpoint.")
    return tree


def _checked_kind(path: str | os.PathLike[str], metadata: Mapping[str, str]) -> str:
    """The structure of a file of this kind and version."""
    if metadata.get("format") != FORMAT or "state" not in metadata:
        raise InputError(
            f"{path} is a safetensors file of something else (its metadata has no format={FORMAT!r}): give a file that "
            "save_state() wrote. Model weights are loaded with load_state_dict()."
        )
    version = metadata.get("version", "")
    if version != str(VERSION):
        newer = version.isdecimal() and len(version) < 10 and int(version) > VERSION
        why = f"a newer graphopt wrote it; this one reads version {VERSION}. Update graphopt" if newer else "there is none such"
        if version.isdecimal() and 0 < int(version[:9]) < VERSION:
            why = f"an older graphopt wrote it; this one reads version {VERSION}. Finish that run with the graphopt that began it"
        raise OtherVersion(f"{path} has version {version[:20]!r}: {why}.")
    return metadata["state"]


def _regular(path: Any) -> Path:
    """Where a path leads: to a regular file, or to none yet. A link stays a link.

    Raises:
        InputError: it cannot be a path, or it leads to something else.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise InputError(f"{path!r} is no path: give a text or a pathlib.Path.")
    try:
        found = Path(path).resolve()
        mode = found.stat().st_mode
    except FileNotFoundError:
        return found
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links, a zero byte
        raise InputError(f"{str(path)!r} leads to no file: {error}. Give another path.") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"
        raise InputError(f"{path} is {kind}, and no file that a state could be in: give another path.")
    return found


def _remove_abandoned(target: Path) -> None:
    """Remove unfinished files of processes that are gone: a process that lives holds a lock on its own."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        with contextlib.suppress(OSError), open(left, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `target` if all goes well, and is gone if not."""
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        with open(beside, "xb") as file:
            with contextlib.suppress(OSError):  # some file systems have no locks; nothing is removed there
                fcntl.flock(file, fcntl.LOCK_EX)
            if not beside.exists():  # taken for abandoned between two lines of ours
                raise OSError(f"another process has removed {beside.name}")
            _remove_abandoned(target)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not every system can flush a folder; the file is in its place
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _write(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """The safetensors format, one tensor after another: `safetensors.torch.save_file` writes to a file of its own choice and does
    not flush it to the disk."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    aligned = sorted(tensors, key=lambda name: -tensors[name].element_size())
    for name in aligned:
        start, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": _TYPES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for name in aligned:
        file.write(_bytes_of(tensors[name]))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def holds(tree: Any) -> bool:
    """Whether a state file gives `tree` back as it is."""
    tensors: dict[str, Tensor] = {}
    try:
        back = _decoded(_encoded(tree, "", tensors), tensors)
    except InputError:
        return False
    (ours, form), (theirs, other) = (pytree.tree_flatten(each) for each in (tree, back))
    return form == other and [type(leaf) for leaf in ours] == [type(leaf) for leaf in theirs]


def _encoded(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """What JSON can hold; an object with a single key stands for what it cannot, and tensors are put aside."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"number": str(float(value))}
    if isinstance(value, Tensor):
        return {"tensor": _put_aside(value, where, tensors)}
    if isinstance(value, list):
        return [_encoded(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
    if type(value) in (tuple, torch.Size):
        return {"tuple": [_encoded(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        pairs = []
        for key, item in value.items():
            if not isinstance(key, (str, int, float, tuple, type(None))):
                raise InputError(
                    f"{where or 'the state'} has the key {key!r}, which a checkpoint cannot hold: use texts or numbers."
                )
            pairs.append([_encoded(key, where, tensors), _encoded(item, f"{where}.{key}" if where else str(key), tensors)])
        return {"dict": pairs}
    raise InputError(
        f"{where or 'the state'} is of type {type(value).__name__}, which a checkpoint cannot hold: it holds tensors, numbers, "
        "texts, and lists, tuples and dicts of them."
    )


def _put_aside(value: Tensor, where: str, tensors: dict[str, Tensor]) -> str:
    """The name under which a tensor is kept."""
    kind = "" if type(value) in (Tensor, nn.Parameter) else f"of type {type(value).__name__}"
    if value.layout != torch.strided or value.is_quantized or value.dtype not in _TYPES:
        kind = f"a {value.layout} tensor of {value.dtype}"
    if value.is_meta:
        kind = "a tensor without memory (meta)"
    if kind:
        raise InputError(f"{where} is {kind}, which a checkpoint cannot hold: it holds dense tensors in memory.")
    name = f"{len(tensors):06d} {where}".encode("ascii", "backslashreplace").decode()
    tensors[name] = value.detach()
    return name


def digest_of(structure: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of everything that a file holds."""
    digest = hashlib.sha256(structure.encode("utf-8", "surrogatepass"))
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _decoded(node: Any, tensors: dict[str, Tensor]) -> Any:
    """The other way round; tensors that are taken are taken out of `tensors`."""
    if isinstance(node, list):
        return [_decoded(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if len(node) != 1:
        raise ValueError(f"an object with the keys {sorted(node)[:3]}")
    (kind, content), = node.items()  # fmt: skip
    if kind == "tensor":
        return tensors.pop(content)
    if kind == "number" and content in ("nan", "inf", "-inf"):
        return float(content)
    if kind == "tuple" and isinstance(content, list):
        return tuple(_decoded(item, tensors) for item in content)
    if kind == "dict" and isinstance(content, list):
        pairs = [(_decoded(key, tensors), _decoded(item, tensors)) for key, item in content]
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key that stands twice")
        return dict(pairs)
    raise ValueError(f"an unknown kind of entry, {str(kind)[:20]!r}")
