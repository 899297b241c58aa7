"""Checkpoints: the server's state between two rounds, written so that a crash cannot damage it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.channel.state import KEPT
from coterie.core.method import State
from coterie.core.tree import Tree, read_tree, write_atomic, write_tree
from coterie.core.weights import Layout
from coterie.errors import RunDirError
from coterie.results.checksums import Mark, from_json, to_json

_FORMAT = 5


@dataclass(frozen=True)
class Checkpoint:
    """The state after ``rounds`` rounds: the method's, the channel's, and the best scores.

    ``lines`` mark how many lines the files of events and of the ledger had.
    """

    rounds: int
    state: State
    channel: Mapping[str, Tree]
    best: Mapping[str, Tree]
    lines: Mapping[str, Mark] = field(default_factory=dict)


class Checkpoints:
    """The last two checkpoints of a run.

    Each is a safetensors file and a small JSON file with its checksum, which is written last: a
    checkpoint exists once its JSON file does.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder = folder
        self.fingerprint = fingerprint

    def save(self, checkpoint: Checkpoint, layout: Layout) -> None:
        """Write a checkpoint, then remove those that are no longer needed."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirError(f"cannot write to {self.folder}: {error.strerror}") from error
        name = f"round-{checkpoint.rounds:06d}"
        tree = {
            "state": checkpoint.state.to_tree(),
            "channel": dict(checkpoint.channel),
            "best": dict(checkpoint.best),
        }
        digest = write_tree(self.folder / f"{name}.safetensors", tree, layout, durable=True)
        note = {
            "format": _FORMAT,
            "rounds": checkpoint.rounds,
            "sha256": digest,
            "run": self.fingerprint,
            "lines": dict(checkpoint.lines),
        }
        write_atomic(self.folder / f"{name}.json", to_json(note).encode(), durable=True)
        kept = {p.stem for p in self._notes()[-KEPT:]}
        for path in self.folder.glob("*round-*"):
            if path.stem not in kept:
                path.unlink(missing_ok=True)

    def mark(self, rounds: int, lines: Mapping[str, Mark]) -> None:
        """Let a checkpoint rely on these lines only, after others were discarded."""
        path = self.folder / f"round-{rounds:06d}.json"
        note = from_json(path.read_text()) | {"lines": dict(lines)}
        write_atomic(path, to_json(note).encode(), durable=True)

    def set_aside(self, rounds: int) -> None:
        """Rename checkpoints after this round, which cannot be used."""
        for number in self.numbers():
            for suffix in ("json", "safetensors"):  # the checkpoint exists while its JSON does
                path = self.folder / f"round-{number:06d}.{suffix}"
                if number > rounds and path.exists():
                    path.replace(self.folder / f"damaged-{number:06d}.{suffix}")

    def numbers(self) -> list[int]:
        """The rounds with a checkpoint, damaged or not."""
        names = (note.stem.removeprefix("round-") for note in self._notes())
        return [int(number) for number in names if number.isdecimal()]

    def _notes(self) -> list[Path]:
        return sorted(self.folder.glob("round-*.json"))

    def __bool__(self) -> bool:
        return bool(self._notes())

    def newest(self, layout: Layout) -> Checkpoint:
        """The last checkpoint; a RunDirError if it is damaged, even if an earlier one is good."""
        last = self.load(layout)[-1]
        if last.rounds < (done := max(self.numbers(), default=0)):
            raise RunDirError(
                f"the checkpoint of round {done} in {self.folder} is damaged. Repeat the round "
                f"with: coterie run --resume {self.folder.parent}"
            )
        return last

    def load(self, layout: Layout) -> list[Checkpoint]:
        """The undamaged checkpoints, oldest first; a RunDirError if there is none."""
        good, bad = [], []
        for note in self._notes():
            try:
                good.append(self._read(note, layout))
            except RunDirError as error:
                bad.append(str(error))
        if not good:
            reason = " ".join(bad) or f"there is no checkpoint in {self.folder}."
            raise RunDirError(f"cannot resume: {reason} Start the run again in a new folder")
        return good

    def _read(self, path: Path, layout: Layout) -> Checkpoint:
        data = path.with_suffix(".safetensors")
        try:
            note: dict[str, Any] = from_json(path.read_bytes().decode())
            digest = hashlib.sha256(data.read_bytes()).hexdigest()
            if note["format"] != _FORMAT:
                raise RunDirError(f"{path} was written by another version of Coterie.")
            if note["run"] != self.fingerprint:
                raise RunDirError(
                    f"{path} belongs to another experiment: its data, starting weights, method, "
                    "loss, training, seed, codecs, clock, availability, round policy or privacy "
                    "differ."
                )
            if path.stem != f"round-{note['rounds']:06d}":
                raise RunDirError(f"{path} is damaged.")
            if note["sha256"] != digest:
                raise RunDirError(f"{data} is damaged (its checksum is wrong).")
            lines = {name: (int(n), int(crc)) for name, (n, crc) in note["lines"].items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise RunDirError(f"{path} is damaged ({error}).") from error
        tree = read_tree(data, layout)
        return Checkpoint(
            note["rounds"], State.from_tree(tree["state"]), tree["channel"], tree["best"], lines
        )
