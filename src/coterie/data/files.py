"""Finding a set's files: in the user's folder, in the cache, or at their home on the network."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from coterie.data.sources import SOURCES
from coterie.errors import DataError

Where = str | Path | None

# What reading a cut or altered file raises, from gzip, tar, xz and zip alike.
DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile)
DOWNLOAD_TIMEOUT_SECONDS = 30


def damaged(path: Path | str, reason: object) -> DataError:
    """The error for a file that cannot be what its name says."""
    return DataError(f"{path}: damaged or not what it should be ({reason}); get a new copy of it")


def places(folder: Path | None, set_name: str, layouts: Sequence[str] = ()) -> list[Path]:
    """The folders to look in, nearest first: the folder, folder/<set>, other programs' layouts."""
    if folder is None:
        return []
    folder = Path(folder)
    if not folder.exists():
        raise DataError(f"the data folder {folder} does not exist: create it or correct the path")
    roots = [folder, folder / set_name]
    return roots + [root / layout for root in roots for layout in layouts]


def find(folders: Sequence[Path], names: Sequence[str]) -> Path | None:
    """The first of ``names`` that exists in any folder; an earlier folder wins."""
    for folder in folders:
        for name in names:
            if (folder / name).is_file():
                return folder / name
    return None


def read_bytes(path: Path) -> bytes:
    """A file's content, unzipped if its name ends in .gz."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as stream:
                return stream.read()
        return path.read_bytes()
    except DAMAGE as error:
        raise damaged(path, error) from error


def tar_files(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the wanted files of an archive, in one pass and without unpacking it.

    ``tarfile`` takes the end of a file for the end of the archive, so a cut archive would merely
    seem smaller: the zeros that mark the true end are checked here.
    """
    try:
        with _unpacked(path) as content:
            tail = _Tail(content)
            # The cast: only read() is used of a stream that is opened in this mode.
            with tarfile.open(fileobj=cast(IO[bytes], tail), mode="r|") as archive:
                for member in archive:
                    if member.isfile() and wanted(member.name):
                        stream = archive.extractfile(member)
                        if stream is not None:
                            yield member.name, stream.read()
            while tail.read(1 << 20):
                pass
            if any(tail.last) or len(tail.last) < tarfile.BLOCKSIZE:
                raise EOFError("it ends before its end mark")
    except DAMAGE as error:
        raise damaged(path, error) from error


def _unpacked(path: Path) -> IO[bytes]:
    """The file, decompressed by what its first bytes say it is."""
    with path.open("rb") as stream:
        start = stream.read(6)
    if start.startswith(b"\x1f\x8b"):
        return cast(IO[bytes], gzip.open(path))
    if start.startswith(b"\xfd7zXZ"):
        return cast(IO[bytes], lzma.open(path))
    if start.startswith(b"BZh"):
        return cast(IO[bytes], bz2.open(path))
    return path.open("rb")


class _Tail:
    """A stream that remembers the last block read from it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.last = b""

    def read(self, size: int) -> bytes:
        content = self.stream.read(size)
        self.last = (self.last + content)[-tarfile.BLOCKSIZE :]
        return content


def zip_member(path: Path, name: str) -> bytes:
    """The content of the member with that file name, in whichever folder of the archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                if member.rsplit("/", 1)[-1] == name:
                    content = archive.read(member)
                    return gzip.decompress(content) if name.endswith(".gz") else content
    except DAMAGE as error:
        raise damaged(path, error) from error
    raise DataError(f"{path}: there is no {name} in this archive; get the official one")


def cache_folder(cache: Where = None) -> Path:
    """Where downloads are kept: ``cache``, else $COTERIE_CACHE, else the system's cache folder."""
    chosen = cache or os.environ.get("COTERIE_CACHE")
    if chosen:
        return Path(chosen)
    import pooch

    return Path(pooch.os_cache("coterie"))


def download(
    set_name: str,
    file: str,
    folder: Path | None = None,
    cache: Where = None,
    mirror: str | None = None,
) -> Path:
    """The path of one of a set's files in the cache, fetched and checked if it is not there yet.

    ``mirror`` replaces the address of its home. ``folder`` is only named in the error: where the
    user could put the file by hand.
    """
    import pooch

    source = SOURCES[set_name]
    algorithm, expected = source.files[file].split(":")
    kept = cache_folder(cache) / set_name / file
    if kept.is_file() and pooch.file_hash(str(kept), alg=algorithm) == expected:
        return kept
    url = f"{(mirror or source.base).rstrip('/')}/{file}"
    by_hand = kept.parent if folder is None else Path(folder) / set_name
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as unchecked:
            fetched = _fetch(url, Path(unchecked), file)
            got = pooch.file_hash(str(fetched), alg=algorithm)
            if got != expected:
                raise DataError(
                    f"{url}: wrong checksum, expected {algorithm} {expected}, got {got}; the "
                    "download was deleted. Try again later or from another mirror, or put a good "
                    f"copy of {file} into {by_hand}"
                )
            os.replace(fetched, kept)
    except OSError as error:
        raise DataError(
            f"data set '{set_name}': cannot fetch {url} ({_shortly(error)}). Without a network, "
            f"put {_listed(source.files)} into {by_hand}"
        ) from error
    return kept


def _fetch(url: str, folder: Path, file: str) -> Path:
    import pooch

    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("WARNING")  # its progress notes are not for the user
    try:
        fetcher = pooch.HTTPDownloader(progressbar=False, timeout=DOWNLOAD_TIMEOUT_SECONDS)
        return Path(
            pooch.retrieve(url, known_hash=None, fname=file, path=folder, downloader=fetcher)
        )
    except ValueError as error:  # an address that is none
        raise OSError(str(error)) from error
    finally:
        logger.setLevel(level)


def _shortly(error: OSError) -> str:
    """The end of a chain of network errors, which is where it says what happened."""
    text = str(error) or type(error).__name__
    return text if len(text) <= 200 else "..." + text[-200:]


def _listed(names: Collection[str]) -> str:
    every = list(names)
    return every[0] if len(every) == 1 else ", ".join(every[:-1]) + " and " + every[-1]
