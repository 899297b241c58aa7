"""Finding a data set's files: in the user's folder, in the cache, or on the Internet."""

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

# The errors of gzip, tar, xz and zip for truncated or altered files.
DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile)
DOWNLOAD_TIMEOUT_SECONDS = 30


def damaged(path: Path | str, reason: object) -> DataError:
    """The error for a file with unexpected content."""
    return DataError(f"{path}: damaged or not the expected file ({reason}); get a new copy")


def places(folder: Path | None, set_name: str, layouts: Sequence[str] = ()) -> list[Path]:
    """The folders to search, in order: the folder, folder/<set>, and other programs' layouts."""
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
    """The content of a file, decompressed if its name ends in .gz."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as stream:
                return stream.read()
        return path.read_bytes()
    except DAMAGE as error:
        raise damaged(path, error) from error


def tar_files(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """The (name, content) of wanted files of an archive, in one pass and without unpacking it.

    ``tarfile`` takes the end of the file for the end of the archive, so that a truncated archive
    would just seem smaller. Therefore, the zeros that mark the end are checked.
    """
    try:
        with _unpacked(path) as content:
            tail = _Tail(content)
            # The cast is safe: in this mode, tarfile only calls read().
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
    """Open a file, decompressed according to its first bytes."""
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
    """A stream that keeps the last block read."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.last = b""

    def read(self, size: int) -> bytes:
        content = self.stream.read(size)
        self.last = (self.last + content)[-tarfile.BLOCKSIZE :]
        return content


def zip_member(path: Path, name: str) -> bytes:
    """The content of the member with the given file name, in any folder of the archive."""
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
    """The folder for downloads: ``cache``, $COTERIE_CACHE, or the system's cache folder."""
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
    """The path of a data set's file in the cache; it is downloaded and checked if necessary.

    ``mirror`` replaces the address of the data set. ``folder`` is only used in error messages, as
    the place to put the file by hand.
    """
    import pooch

    source = SOURCES[set_name]
    algorithm, expected = source.files[file].split(":")
    cached = cache_folder(cache) / set_name / file
    if cached.is_file() and pooch.file_hash(str(cached), alg=algorithm) == expected:
        return cached
    url = f"{(mirror or source.base).rstrip('/')}/{file}"
    manual_dir = cached.parent if folder is None else Path(folder) / set_name
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as temporary:
            fetched = _fetch(url, Path(temporary), file)
            actual = pooch.file_hash(str(fetched), alg=algorithm)
            if actual != expected:
                raise DataError(
                    f"{url}: wrong checksum, expected {algorithm} {expected}, got {actual}; the "
                    "download was deleted. Try again later or from another mirror, or put a good "
                    f"copy of {file} into {manual_dir}"
                )
            os.replace(fetched, cached)
    except OSError as error:
        raise DataError(
            f"data set '{set_name}': cannot download {url} ({_shortly(error)}). Without a network, "
            f"put {_listed(source.files)} into {manual_dir}"
        ) from error
    return cached


def _fetch(url: str, folder: Path, file: str) -> Path:
    import pooch

    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("WARNING")  # do not show its progress messages
    try:
        fetcher = pooch.HTTPDownloader(progressbar=False, timeout=DOWNLOAD_TIMEOUT_SECONDS)
        return Path(
            pooch.retrieve(url, known_hash=None, fname=file, path=folder, downloader=fetcher)
        )
    except ValueError as error:  # an invalid address
        raise OSError(str(error)) from error
    finally:
        logger.setLevel(level)


def _shortly(error: OSError) -> str:
    """The end of a chain of network errors, which says what happened."""
    text = str(error) or type(error).__name__
    return text if len(text) <= 200 else "..." + text[-200:]


def _listed(names: Collection[str]) -> str:
    listed = list(names)
    return listed[0] if len(listed) == 1 else ", ".join(listed[:-1]) + " and " + listed[-1]
