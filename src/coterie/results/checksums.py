"""Files with checksums: files that grow line by line, and files that are written at once.

A checksum is a CRC-32 in decimal. The checksum of a line continues that of the line before, so that
missing, moved and duplicated lines are detected. Files without checksums, written by hand or by an
earlier version, can be read but not appended to.
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
Mark = tuple[int, int]  # number of lines and checksum of the last; (0, 0) for none


# --- lines --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LineFormat:
    """The format of a line: which part its checksum covers, and where the checksum is."""

    title: str  # the header line, if any, without the checksum's column
    covered: Callable[[str], str]  # the covered part of a line
    sealed: Callable[[str, int], str]  # the covered part with its checksum
    pattern: re.Pattern[bytes]  # of a line: the covered part, and the checksum
    plain: Callable[[str], str]  # the covered part as a line without checksum
    parse: Callable[[str], dict[str, Any]]  # reads a line without checksum; ValueError if invalid


def _object(text: str) -> dict[str, Any]:
    try:
        table = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(table, dict):
        raise ValueError("it is not a table")
    return table


def _event(text: str) -> dict[str, Any]:
    event = _object(text)
    if not isinstance(event.get("round"), int):
        raise ValueError("it has no round")
    return event


def _row(text: str) -> dict[str, Any]:
    (cells,) = csv.reader([text])
    row: dict[str, Any] = dict(zip(LEDGER, cells, strict=True))
    return row | {key: int(row[key]) for key in ("round", "client", "down", "up")}


JSON_LINES = LineFormat(
    title="",
    covered=lambda text: text[:-1],
    sealed=lambda text, crc: f'{text}, "{CRC}": {crc}}}',
    pattern=re.compile(rb'(\{.*), "crc": (\d{1,10})\}', re.DOTALL),
    plain=lambda text: f"{text}}}",
    parse=_object,
)
EVENTS = replace(JSON_LINES, parse=_event)
LEDGER_ROWS = LineFormat(
    title=",".join(LEDGER),
    covered=lambda text: text,
    sealed=lambda text, crc: f"{text},{crc}",
    pattern=re.compile(rb"((?:[^,]*,){%d}[^,]*),(\d{1,10})" % (len(LEDGER) - 1), re.DOTALL),
    plain=lambda text: text,
    parse=_row,
)


@dataclass(frozen=True)
class Line:
    """An intact line without its checksum; ``number`` is its position in the file."""

    text: str
    value: dict[str, Any]
    crc: int
    number: int


@dataclass(frozen=True)
class IntactLines:
    """The intact lines of a file.

    ``whole`` are the lines from the first on without a gap, and ``later`` those after damaged or
    missing lines. ``damaged`` are the numbers, from 1, of lines that were changed or moved. An
    incomplete last line, as a crash leaves it, is in none of these.
    """

    whole: Sequence[Line] = ()
    later: Sequence[Line] = ()
    damaged: Sequence[int] = ()
    checked: bool = False  # whether lines have checksums

    @property
    def every(self) -> list[Line]:
        """All intact lines."""
        return [*self.whole, *self.later]

    def reach(self, mark: Mark) -> bool:
        """Whether all lines up to this mark are intact."""
        count, crc = mark
        return len(self.whole) >= count and (count == 0 or self.whole[count - 1].crc == crc)


class LineFile:
    """A file that grows line by line, each line with a checksum."""

    def __init__(self, path: Path, form: LineFormat) -> None:
        self.path, self.form = path, form
        self._mark: Mark | None = None  # known once the file was read or written

    @property
    def mark(self) -> Mark:
        """The mark of the current end of the file."""
        if self._mark is None:
            content = self.read()
            lines = content.every
            if lines and not content.checked:
                raise RunDirError(
                    f"{self.path} has no checksums: it was written by another version of Coterie. "
                    "Start the run again in a new folder"
                )
            self._mark = len(lines), lines[-1].crc if lines else 0
        return self._mark

    def append(self, texts: Iterable[str]) -> None:
        """Add lines; an OSError if they cannot be written."""
        written, mark = self._sealed(texts, self.mark)
        with self.path.open("a+b") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            torn = file.read() not in (b"", b"\n")  # a crash left an incomplete line
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

    def read(self) -> IntactLines:
        """Read and check all lines; a RunDirError if the file cannot be read at all."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return IntactLines()
        except OSError as error:
            raise RunDirError(f"{self.path} cannot be read: {error.strerror}") from error
        return read_lines(data, self.form)


def read_lines(data: bytes, form: LineFormat) -> IntactLines:
    """Check the lines of a file's content."""
    *ended, last = data.split(b"\n")
    numbered = [(number, line) for number, line in enumerate(ended, 1) if line]
    torn = [(len(ended) + 1, last)] if last else []
    if form.title:
        titles = (form.title.encode(), f"{form.title},{CRC}".encode())
        numbered = [pair for pair in numbered if pair[1] not in titles]
    sealed = any(form.pattern.fullmatch(line) for _, line in (*numbered, *torn))
    lines = _checked(numbered, form) if sealed else _unchecked(numbered, form)
    if not torn:
        return lines
    # Keep the last line if only its newline is missing; otherwise a crash cut it short.
    longer = _checked([*numbered, *torn], form) if sealed else _unchecked([*numbered, *torn], form)
    cuttable = not sealed and bool(form.title)  # a number that was cut short is still a number
    return lines if cuttable or torn[0][0] in longer.damaged else longer


def _checked(numbered: Sequence[tuple[int, bytes]], form: LineFormat) -> IntactLines:
    whole: list[Line] = []
    later: list[Line] = []
    damaged: list[int] = []
    checksums: set[int] = set()
    last_good = previous = 0  # checksums of the last good line, and of the line before
    for number, raw in numbered:
        match = form.pattern.fullmatch(raw)
        checksum = int(match[2]) if match else -1
        follows = [c for c in (last_good, previous) if match and checksum == crc32(match[1], c)]
        if match and follows and checksum not in checksums:
            text = form.plain(match[1].decode())
            line = Line(text, form.parse(text), checksum, number)
            (whole if follows[0] == last_good and not later else later).append(line)
            checksums.add(checksum)
            last_good = checksum
        else:
            damaged.append(number)
        previous = checksum if match else previous
    return IntactLines(whole, later, damaged, checked=True)


def _unchecked(numbered: Sequence[tuple[int, bytes]], form: LineFormat) -> IntactLines:
    whole: list[Line] = []
    later: list[Line] = []
    damaged: list[int] = []
    for number, raw in numbered:
        try:
            text = raw.decode()
            line = Line(text, form.parse(text), 0, number)
        except ValueError:
            damaged.append(number)
            continue
        (later if damaged else whole).append(line)
    return IntactLines(whole, later, damaged)


# --- files written at once ----------------------------------------------------------------------

_LAST = re.compile(r',\s*"crc": (\d{1,10})\s*\}\s*\Z')
_NOTE = re.compile(rb"^# crc (\d+): .*\n", re.MULTILINE)
_WORDS = "of all other lines. Remove this line if you change them"


def to_json(tree: Mapping[str, Any], indent: int | None = None) -> str:
    """A table as JSON; its last key is a checksum of the text before it.

    >>> to_json({"a": 1})
    '{"a": 1, "crc": 2057863684}'
    >>> from_json(to_json({"a": 1}))
    {'a': 1}
    """
    text = json.dumps(tree, indent=indent)[:-1].rstrip()
    between, end = (", ", "}") if indent is None else (f",\n{' ' * indent}", "\n}")
    return f'{text}{between}"{CRC}": {crc32(text.encode())}{end}'


def from_json(text: str) -> dict[str, Any]:
    """Read a table of ``to_json``; a ValueError if it is damaged. The checksum may be missing."""
    table, last = _object(text), _LAST.search(text)
    if last is None:
        return table
    if int(last[1]) != crc32(text[: last.start()].encode()):
        raise ValueError("its checksum is wrong")
    del table[CRC]
    return table


def read_json(path: Path, advice: str = "") -> dict[str, Any]:
    """Read the table in a JSON file; a RunDirError with this advice if it is damaged."""
    try:
        return from_json(path.read_bytes().decode())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunDirError(f"{path} is damaged ({reason}){advice and '; '}{advice}") from error


def with_note(text: str) -> str:
    """The text of a TOML file with its checksum in a comment at the top.

    >>> check_note(with_note("[run]\\n").encode())
    >>> check_note(with_note("[run]\\n").replace("run", "ran").encode())
    Traceback (most recent call last):
    ValueError: its checksum is wrong
    """
    return f"# {CRC} {crc32(text.encode())}: {_WORDS}\n{text}"


def check_note(data: bytes) -> None:
    """Raise a ValueError if a file has such a comment but was changed."""
    note = _NOTE.search(data)
    if note is not None and int(note[1]) != crc32(data[: note.start()] + data[note.end() :]):
        raise ValueError("its checksum is wrong")
