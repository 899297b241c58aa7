"""Files that carry checksums: lines that are added one by one, and files that are written whole.

A checksum is a CRC-32 in decimal. That of a line continues that of the line before, so that a line
which is missing, moved or there twice is found, too. Files without any, written by hand or by an
earlier version, can be read, but not written on.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from coterie.core.tree import write_atomic
from coterie.errors import RunDirError

CRC = "crc"
LEDGER = ("round", "client", "kind", "down", "up")  # the columns of ledger.csv
Mark = tuple[int, int]  # how many lines a file has, and the checksum of the last: (0, 0) for none


# --- lines --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """How a line is written: what of it is covered by its checksum, and where that stands."""

    title: str  # the first line of a file, if it has one, without the checksum's column
    covered: Callable[[str], str]  # a line without what closes it
    sealed: Callable[[str, int], str]  # what is covered, with the checksum
    pattern: re.Pattern[bytes]  # of a line with a checksum: what is covered, and the checksum
    plain: Callable[[str], str]  # what is covered, as a line without a checksum
    parse: Callable[[str], dict[str, Any]]  # a line without a checksum; a ValueError if it is none


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it is no table")
    return found


def _event(text: str) -> dict[str, Any]:
    found = _object(text)
    if not isinstance(found.get("round"), int):
        raise ValueError("it has no round")
    return found


def _row(text: str) -> dict[str, Any]:
    (cells,) = csv.reader([text])
    found: dict[str, Any] = dict(zip(LEDGER, cells, strict=True))
    return found | {key: int(found[key]) for key in ("round", "client", "down", "up")}


JSON_LINES = Format(
    title="",
    covered=lambda text: text[:-1],
    sealed=lambda text, crc: f'{text}, "{CRC}": {crc}}}',
    pattern=re.compile(rb'(\{.*), "crc": (\d{1,10})\}', re.DOTALL),
    plain=lambda text: f"{text}}}",
    parse=_object,
)
EVENTS = replace(JSON_LINES, parse=_event)
LEDGER_ROWS = Format(
    title=",".join(LEDGER),
    covered=lambda text: text,
    sealed=lambda text, crc: f"{text},{crc}",
    pattern=re.compile(rb"((?:[^,]*,){%d}[^,]*),(\d{1,10})" % (len(LEDGER) - 1), re.DOTALL),
    plain=lambda text: text,
    parse=_row,
)


@dataclass(frozen=True)
class Line:
    """A line as it was written, without its checksum; ``number`` is its place in the file."""

    text: str
    value: dict[str, Any]
    crc: int
    number: int


@dataclass(frozen=True)
class Lines:
    """What a file has that is as it was written.

    ``whole`` are the lines that follow each other from the first on without a gap, ``later`` those
    that come after lines which are damaged or missing. ``damaged`` are the numbers, from 1, of
    lines that are not as they were written, or not where they were. A last line without an end,
    as a crash leaves it, is none of them.
    """

    whole: Sequence[Line] = ()
    later: Sequence[Line] = ()
    damaged: Sequence[int] = ()
    checked: bool = False  # whether lines have checksums

    @property
    def every(self) -> list[Line]:
        """All lines that are as they were written."""
        return [*self.whole, *self.later]

    def reach(self, mark: Mark) -> bool:
        """Whether all lines are there that were when this mark was taken."""
        count, crc = mark
        return len(self.whole) >= count and (count == 0 or self.whole[count - 1].crc == crc)


class LineFile:
    """A file that grows by a line at a time, each with a checksum."""

    def __init__(self, path: Path, form: Format) -> None:
        self.path, self.form = path, form
        self._mark: Mark | None = None  # known once it has been written or read here

    @property
    def mark(self) -> Mark:
        """The present end."""
        if self._mark is None:
            found = self.read()
            lines = found.every
            if lines and not found.checked:
                raise RunDirError(
                    f"{self.path} has no checksums: another version of Coterie wrote it. Start the "
                    "run again in a new folder"
                )
            self._mark = len(lines), lines[-1].crc if lines else 0
        return self._mark

    def append(self, texts: Iterable[str]) -> None:
        """Add lines; an OSError if they cannot be written."""
        written, mark = self._sealed(texts, self.mark)
        with self.path.open("a+b") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            torn = file.read() not in (b"", b"\n")  # a crash left a line without its end
            file.write((self._title() if not end else "\n" * torn).encode() + written.encode())
        self._mark = mark

    def write(self, texts: Iterable[str]) -> None:
        """Replace all lines."""
        written, mark = self._sealed(texts, (0, 0))
        write_atomic(self.path, (self._title() + written).encode(), durable=True)
        self._mark = mark

    def _title(self) -> str:
        return f"{self.form.title},{CRC}\n" if self.form.title else ""

    def _sealed(self, texts: Iterable[str], mark: Mark) -> tuple[str, Mark]:
        count, crc = mark
        lines = []
        for text in texts:
            covered = self.form.covered(text)
            crc = crc32(covered.encode(), crc)
            lines.append(self.form.sealed(covered, crc) + "\n")
        return "".join(lines), (count + len(lines), crc)

    def read(self) -> Lines:
        """What is there, each line checked; a RunDirError if the file cannot be read at all."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return Lines()
        except OSError as error:
            raise RunDirError(f"{self.path} cannot be read: {error.strerror}") from error
        return read_lines(data, self.form)


def read_lines(data: bytes, form: Format) -> Lines:
    """The lines of a file's content, each checked."""
    *ended, last = data.split(b"\n")
    found = [(number, line) for number, line in enumerate(ended, 1) if line]
    torn = [(len(ended) + 1, last)] if last else []
    if form.title:
        titles = (form.title.encode(), f"{form.title},{CRC}".encode())
        found = [pair for pair in found if pair[1] not in titles]
    sealed = any(form.pattern.fullmatch(line) for _, line in (*found, *torn))
    lines = _checked(found, form) if sealed else _unchecked(found, form)
    if not torn:
        return lines
    # Only the line's end may be missing; what is less than that was being written.
    more = _checked([*found, *torn], form) if sealed else _unchecked([*found, *torn], form)
    cuttable = not sealed and bool(form.title)  # numbers cut short are numbers, too
    return lines if cuttable or torn[0][0] in more.damaged else more


def _checked(found: Sequence[tuple[int, bytes]], form: Format) -> Lines:
    whole: list[Line] = []
    later: list[Line] = []
    damaged: list[int] = []
    seen: set[int] = set()
    last = before = 0  # the checksum of the last good line; of the line before, good or not
    for number, raw in found:
        match = form.pattern.fullmatch(raw)
        own = int(match[2]) if match else -1
        follows = [c for c in (last, before) if match and own == crc32(match[1], c)]
        if match and follows and own not in seen:
            text = form.plain(match[1].decode())
            line = Line(text, form.parse(text), own, number)
            (whole if follows[0] == last and not later else later).append(line)
            seen.add(own)
            last = own
        else:
            damaged.append(number)
        before = own if match else before
    return Lines(whole, later, damaged, checked=True)


def _unchecked(found: Sequence[tuple[int, bytes]], form: Format) -> Lines:
    whole: list[Line] = []
    later: list[Line] = []
    damaged: list[int] = []
    for number, raw in found:
        try:
            text = raw.decode()
            line = Line(text, form.parse(text), 0, number)
        except ValueError:
            damaged.append(number)
            continue
        (later if damaged else whole).append(line)
    return Lines(whole, later, damaged)


# --- whole files --------------------------------------------------------------------------------

_LAST = re.compile(r',\s*"crc": (\d{1,10})\s*\}\s*\Z')
_NOTE = re.compile(rb"^# crc (\d+): .*\n", re.MULTILINE)
_WORDS = "of all other lines. Remove this line if you change them"


def to_json(tree: Mapping[str, Any], indent: int | None = None) -> str:
    """A table as JSON, its last key a checksum of what is before it.

    >>> to_json({"a": 1})
    '{"a": 1, "crc": 2057863684}'
    >>> from_json(to_json({"a": 1}))
    {'a': 1}
    """
    text = json.dumps(tree, indent=indent)[:-1].rstrip()
    between, end = (", ", "}") if indent is None else (f",\n{' ' * indent}", "\n}")
    return f'{text}{between}"{CRC}": {crc32(text.encode())}{end}'


def from_json(text: str) -> dict[str, Any]:
    """A table that ``to_json`` wrote; a ValueError if it is damaged. By hand, it may lack one."""
    found, last = _object(text), _LAST.search(text)
    if last is None:
        return found
    if int(last[1]) != crc32(text[: last.start()].encode()):
        raise ValueError("its checksum is wrong")
    del found[CRC]
    return found


def read_json(path: Path, advice: str = "") -> dict[str, Any]:
    """The table in a JSON file; a RunDirError, with the advice, if it is damaged."""
    try:
        return from_json(path.read_bytes().decode())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RunDirError(f"{path} is damaged ({why}){advice and '; '}{advice}") from error


def with_note(text: str) -> str:
    """A TOML file's text, with a comment at its top that has a checksum of it.

    >>> check_note(with_note("[run]\\n").encode())
    >>> check_note(with_note("[run]\\n").replace("run", "ran").encode())
    Traceback (most recent call last):
    ValueError: its checksum is wrong
    """
    return f"# {CRC} {crc32(text.encode())}: {_WORDS}\n{text}"


def check_note(data: bytes) -> None:
    """A ValueError if a file has such a comment, and is not as it was written."""
    note = _NOTE.search(data)
    if note is not None and int(note[1]) != crc32(data[: note.start()] + data[note.end() :]):
        raise ValueError("its checksum is wrong")
