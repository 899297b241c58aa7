"""Trees: nested data of weights, tensors and scalars, packed into JSON and a list of tensors.

All server state, client state, orders and replies are stored and sent in this form. It round-trips
exactly, including integer keys and tuples, and does not need pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from coterie.core.weights import Layout, Weights
from coterie.errors import CoterieError, RunDirError

Tree = Any  # None | bool | int | float | str | Tensor | Weights | list | tuple | dict of these
_SCALARS = frozenset({type(None), bool, int, float, str})


def pack(tree: Tree, model_layout: Layout, tensors: list[Tensor]) -> Any:
    """Pack a tree into a JSON value; its tensors are added to a list, and named by their numbers.

    >>> pack({1: (2.5, "a")}, Layout(()), [])
    {'$dict': [[1, {'$tuple': [2.5, 'a']}]]}
    """
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    kind = type(tree)
    if kind is list or kind is tuple:
        if _SCALARS.issuperset(map(type, tree)):  # nothing to look into: long tables are quick
            packed = list(tree)
        else:
            packed = [pack(t, model_layout, tensors) for t in tree]
        return packed if kind is list else {"$tuple": packed}
    if isinstance(tree, Weights):
        tensors.append(tree.vector)
        if tree.layout is model_layout or tree.layout == model_layout:
            return {"$weights": len(tensors) - 1}
        return {"$weights": len(tensors) - 1, "of": list(tree.layout.names)}
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return {"$tensor": len(tensors) - 1}
    if isinstance(tree, tuple):
        return {"$tuple": [pack(t, model_layout, tensors) for t in tree]}
    if isinstance(tree, Sequence):
        return [pack(t, model_layout, tensors) for t in tree]
    if isinstance(tree, Mapping):
        if all(isinstance(k, str) and not k.startswith("$") for k in tree):
            return {k: pack(v, model_layout, tensors) for k, v in tree.items()}
        return {"$dict": [[k, pack(v, model_layout, tensors)] for k, v in tree.items()]}
    raise CoterieError(
        f"a {type(tree).__name__} cannot be stored or sent: use numbers, strings, tensors, "
        "weights, or lists, tuples and dicts of these"
    )


def unpack(packed: Any, tensors: Sequence[Tensor], model_layout: Layout) -> Tree:
    """Restore a packed tree."""
    if isinstance(packed, list):
        return [unpack(p, tensors, model_layout) for p in packed]
    if not isinstance(packed, dict):
        return packed
    marks = [key for key in packed if key.startswith("$")]
    if marks and packed.keys() - {"of"} != {marks[0]}:
        raise CoterieError(
            f"this is not a packed tree: an object with {marks[0]} has other keys as well"
        )
    if "$weights" in packed:
        layout = model_layout.only(packed["of"]) if "of" in packed else model_layout
        return Weights(layout, tensors[packed["$weights"]])
    if "$tensor" in packed:
        return tensors[packed["$tensor"]]
    if "$tuple" in packed:
        return tuple(unpack(p, tensors, model_layout) for p in packed["$tuple"])
    if "$dict" in packed:
        return {k: unpack(v, tensors, model_layout) for k, v in packed["$dict"]}
    return {k: unpack(v, tensors, model_layout) for k, v in packed.items()}


def same(a: Tree, b: Tree) -> bool:
    """Whether two trees are equal, with tensors compared bit by bit."""
    if isinstance(a, Weights) and isinstance(b, Weights):
        return a.layout == b.layout and same(a.vector, b.vector)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def write_tree(path: Path, tree: Tree, model_layout: Layout, *, durable: bool) -> str:
    """Write a tree atomically to a safetensors file, and return the file's SHA-256.

    With ``durable``, wait until the file is on disk, so that it survives a power failure.
    """
    tensors: list[Tensor] = []
    packed = pack(tree, model_layout, tensors)
    arrays = {str(i): t.detach().contiguous().clone() for i, t in enumerate(tensors)}
    text = json.dumps(packed)
    data = save(arrays, metadata={"tree": text, "sum": _digest(text, list(arrays.values()))})
    write_atomic(path, data, durable=durable)
    return hashlib.sha256(data).hexdigest()


def to_safetensors(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> bytes:
    """The content of a safetensors file: always the same bytes for the same tensors.

    The library writes the metadata ``about`` the tensors in any order; here, it is sorted by name.
    """
    data = save({name: t.detach().clone() for name, t in tensors.items()}, metadata=dict(about))
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = dict(sorted(about.items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # keep the tensors aligned
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _digest(text: str, tensors: Sequence[Tensor]) -> str:
    """A digest of a tree, including the tensors' types and shapes."""
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(_bits(tensor))
    return digest.hexdigest()


def write_atomic(path: Path, data: bytes, *, durable: bool) -> None:
    """Replace a file in one step: readers see the old content or the new, never a mixture."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise RunDirError(
            f"cannot write {path}: {error.strerror}. Free some space or choose another folder; "
            "everything saved before is intact"
        ) from error


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_tree(path: Path, model_layout: Layout) -> Tree:
    """Read a file of ``write_tree``; the tensors are mapped from the file, not copied."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = [file.get_tensor(str(i)) for i in range(len(list(file.keys())))]
        if metadata["sum"] != _digest(metadata["tree"], tensors):
            raise ValueError("its checksum is wrong")
        return unpack(json.loads(metadata["tree"]), tensors, model_layout)
    except FileNotFoundError as error:
        raise RunDirError(f"{path} is missing") from error
    except (SafetensorError, LookupError, ValueError, TypeError, RuntimeError, OSError) as error:
        raise RunDirError(f"{path} is damaged or not a file of Coterie ({error})") from error
