"""Folders of graph files at URLs of fsspec, downloaded to the partition directory and then read as local folders.

The names begin with a digest of the URL:

- the folder ``.url`` has complete and verified files of the graph;
- the folder ``.parts`` has incomplete files, and ``files.json``, which describes the complete files;
- the process that downloads or maps the files holds the lock ``.lock``.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote as quote_url
from weakref import WeakKeyDictionary

import fsspec
from filelock import FileLock, Timeout
from fsspec.registry import known_implementations
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_gnn.arguments import quote
from lightning_gnn.console import progress_bar
from lightning_gnn.data.shards import Graph
from lightning_gnn.data.store import sync, write_atomically, writing
from lightning_gnn.extensions.graph_files.folders import FolderSource, Split

T = TypeVar("T")

BLOCK = 1 << 24
"""Bytes of one range request; a broken transfer continues after the last complete block."""

PAUSES_S = (1.0, 4.0)
"""Seconds between attempts of a transfer."""

LISTS = ("checksums.txt", "files.txt")
TAGS = ("ETag", "etag", "Content-MD5", "md5Hash", "Last-Modified", "LastModified", "last_modified", "mtime", "updated", "created")
"""Properties of remote files that change with their contents, most reliable first."""

_LINE = re.compile(r"(?:([0-9a-fA-F]{64}) [ *])?(.+)")


class TransferError(Exception):
    """Failure of one attempt of a transfer."""


class RemoteFile(NamedTuple):
    """Description of a remote file, to detect changes.

    Attributes:
        size: bytes, if the server reports them.
        tag: ETag or modification time, if the server reports one.
        checksum: checksum in ``checksums.txt``, or another list; empty if it is not listed.
    """

    size: int | None
    tag: str
    checksum: str


@contextmanager
def transfers() -> Iterator[None]:
    """Context manager that converts errors of a filesystem, of any type, to `TransferError`."""
    try:
        yield
    except Exception as error:
        raise TransferError(f"{type(error).__name__}: {error}") from error


def attempt(transfer: Callable[[], T], url: str, action: str = "downloaded") -> T:
    """Returns the result of `transfer`, after up to three attempts; `action` is a participle for the error."""
    for pause in PAUSES_S:
        try:
            return transfer()
        except TransferError as error:
            rank_zero_info(f"{url}: {error}. Next attempt in {pause:g} s")
            time.sleep(pause)
    try:
        return transfer()
    except TransferError as error:
        raise ValueError(
            f"{url} cannot be {action} in {len(PAUSES_S) + 1} attempts ({error}). Check the URL, its server and the network, "
            "and run again: complete files and blocks are not downloaded again."
        ) from error


def checked_name(name: str, url: str) -> str:
    """Returns the normalized path of a file in a folder; raises ValueError for other paths."""
    path = PureWindowsPath(name)  # of both systems: it also recognizes / and drives
    if path.anchor or ".." in path.parts or not path.parts or not name.isprintable():
        raise ValueError(f"{url} lists {quote(name)}, but names must be paths of files in the folder. Correct the name.")
    return str(PurePosixPath(name))


class UrlFolder:
    """Folder at a URL; its files are downloaded once per machine, and again if they change.

    Attributes:
        checked_by: checksum of the files, and its list, for messages.

    Args:
        url: URL of the folder, as fsspec reads it.
        store: partition directory.
    """

    checked_by = "sha256", "checksums.txt"

    def __init__(self, url: str, store: Path) -> None:
        base = store / hashlib.blake2b(url.encode(), digest_size=12).hexdigest()
        self._url, self._folder, self._parts = url, str(base.with_suffix(".url")), base.with_suffix(".parts")
        self._sums, self._block = dict[str, str](), BLOCK

    @cached_property
    def files(self) -> dict[str, RemoteFile]:
        """Files of the remote folder by name; listed once, since a datamodule has one graph."""
        return attempt(self._list_files, self._url)

    @cached_property
    def _remote(self) -> tuple[Any, str]:
        """Filesystem and path of the remote folder."""
        try:
            system, root = fsspec.url_to_fs(self._url)
        except ImportError as error:
            protocol = self._url.partition("://")[0]
            package = known_implementations[protocol]["class"].partition(".")[0].replace("fsspec", f'"fsspec[{protocol}]"')
            raise ModuleNotFoundError(
                f"Reading {self._url} needs a package that is not installed ({error}). Run pip install {package}."
            ) from error
        except ValueError as error:
            raise ValueError(f"source={self._url!r} must be a URL of fsspec, such as 's3://bucket/graph' ({error}).") from error
        return system, root.rstrip("/")

    @property
    def is_http(self) -> bool:
        return "http" in self._remote[0].protocol

    def _path(self, name: str) -> str:
        return f"{self._remote[1]}/{quote_url(name) if self.is_http else name}"

    def _list_files(self) -> dict[str, RemoteFile]:
        system, root = self._remote
        with transfers():
            system.invalidate_cache()
            found = {} if self.is_http else system.find(root, detail=True)
        described = {path.removeprefix(root).lstrip("/"): info for path, info in found.items() if info["type"] == "file"}
        self._sums = self._read_list(LISTS[0]) or (self.is_http and self._read_list(LISTS[1])) or {}
        if self.is_http and not self._sums:
            raise ValueError(
                f"{self._url} must have a file checksums.txt (or files.txt) that lists the graph's files, because HTTP servers "
                "do not list folders. Run sha256sum * > checksums.txt in the folder, and upload the file."
            )
        names = {checked_name(name, self._url) for name in {*described, *self._sums} - {"", *LISTS}}
        return {name: self._describe(name, described.get(name)) for name in sorted(names)}

    def read_text(self, name: str) -> str | None:
        """Returns the content of a small file; None if it does not exist."""
        system = self._remote[0]
        try:
            return system.cat_file(self._path(name)).decode()
        except Exception as error:
            # Object stores answer 403 for missing files if the public may not list them.
            if isinstance(error, (FileNotFoundError, PermissionError)) or getattr(error, "status", None) == 403:
                return None
            raise TransferError(f"{name}: {type(error).__name__}: {error}") from error

    def _read_list(self, name: str) -> dict[str, str]:
        """Returns the names in a list of files, with their checksums; empty if the list does not exist."""
        sums = {}
        for line in filter(str.strip, (self.read_text(name) or "").splitlines()):
            checksum, file = _LINE.fullmatch(line).groups()  # type: ignore[union-attr]
            if name == LISTS[0] and not checksum:
                raise ValueError(f"{self._path(name)} must have lines of sha256sum, got {quote(line)}. Run sha256sum * > {name}.")
            sums[checked_name(file.strip(), self._path(name))] = (checksum or "").lower()
        return sums

    def _describe(self, name: str, info: Any = None) -> RemoteFile:
        if info is None:
            with transfers():
                self._remote[0].invalidate_cache()
                info = self._remote[0].info(self._path(name))
        tag = next((str(info[key]) for key in TAGS if info.get(key)), "")
        return RemoteFile(info.get("size"), tag, self._sums.get(name, ""))

    @contextmanager
    def _hold_lock(self, store: Path) -> Iterator[None]:
        """Context manager that lets one process of the machine download; the system frees the lock if the process dies."""
        lock = FileLock(self._parts.with_suffix(".lock"))
        with writing(store):
            store.mkdir(parents=True, exist_ok=True)
            with suppress(Timeout):
                lock.acquire(timeout=2)
            if not lock.is_locked:
                rank_zero_info(f"Waiting for another process, which downloads {self._url}.")
                lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _download(self, store: Path) -> None:
        """Download new and changed files, and remove files that the remote folder does not have."""
        folder, record, known = Path(self._folder), self._parts / "files.json", dict[str, Any]()
        with suppress(OSError, ValueError):
            known = json.loads(record.read_text())

        def is_complete(name: str, file: RemoteFile) -> bool:
            local = folder / name
            return known.get(name) == [*file] and local.is_file() and file.size in (None, local.stat().st_size)

        missing = {name: file for name, file in self.files.items() if not is_complete(name, file)}
        known = {name: [*file] for name, file in self.files.items() if name not in missing}
        num_bytes = sum(file.size or 0 for file in missing.values())
        with writing(store), progress_bar(f"Downloading {self._url}", num_bytes, "bytes") as advance:
            for path in folder, self._parts:
                path.mkdir(parents=True, exist_ok=True)
            write_atomically(record, json.dumps(known))
            for path in folder.rglob("*"):
                if path.is_file() and path.relative_to(folder).as_posix() not in self.files:
                    path.unlink()
            for name in missing:
                part = attempt(partial(self._fetch, name, advance), f"File {name} of {self._url}")
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                sync(part)
                part.replace(folder / name)
                known[name] = [*self.files[name]]
                write_atomically(record, json.dumps(known))
            for path in {*self._parts.iterdir()} - {record}:
                path.unlink()  # of files that have changed since

    def _fetch(self, name: str, advance: Callable[[int], None]) -> Path:
        """Returns a complete and verified file under a temporary name, which identifies the version of the remote file."""
        file = self.files[name] = self._describe(name)  # it may have changed since it was listed
        part = self._parts / f"{hashlib.blake2b(repr((name, file)).encode(), digest_size=12).hexdigest()}.part"
        if not (file.tag and self._block):  # the rest could be of another version, or a stream starts at its beginning
            part.unlink(missing_ok=True)
        with part.open("ab") as out:
            for piece in self._pieces(name, out.tell()):
                out.write(piece)
                advance(len(piece))
        if self._describe(name) != file:
            reason = "it changed during the transfer"
        elif file.size not in (None, part.stat().st_size):
            reason = f"{part.stat().st_size} bytes arrived of {file.size}"
        elif file.checksum not in ("", self._checksum_of(part)):
            reason = "its {} differs from {}".format(*self.checked_by)
        else:
            return part
        part.unlink()
        raise TransferError(reason)

    def _checksum_of(self, file: Path) -> str:
        digest = hashlib.sha256()
        with file.open("rb") as opened:
            for piece in iter(partial(opened.read, 1 << 20), b""):
                digest.update(piece)
        return digest.hexdigest()

    def _pieces(self, name: str, begin: int) -> Iterator[bytes]:
        """Yields the bytes of a remote file from `begin` on."""
        with transfers():
            try:
                with self._remote[0].open(self._path(name), "rb", block_size=self._block, cache_type="none") as remote:
                    if begin:
                        remote.seek(begin)
                    while piece := remote.read(BLOCK):
                        yield piece
            except ValueError:  # HTTP without ranges: the next attempt reads one stream
                self._block = 0 if self.is_http else BLOCK
                raise


class UrlSource(UrlFolder, FolderSource):
    """URL of a folder as a graph source.

    Args:
        url, store: see :class:`UrlFolder`.
        memory, input_type: see :class:`~lightning_gnn.extensions.graph_files.folders.FolderSource`.
    """

    def __init__(self, url: str, store: Path, memory: int | None = None, input_type: str | None = None) -> None:
        UrlFolder.__init__(self, url, store)
        FolderSource.__init__(self, self._folder, memory, input_type)
        self.source = url

    @override
    def load(self, args: Mapping[str, Any] | None, store: Path) -> tuple[Graph, Split | None]:
        if args:
            raise ValueError(f"source_kwargs={[*args]} does not support {self._url}. Set options such as FSSPEC_S3_ANON=true.")
        with self._hold_lock(store):
            self._download(store)
            try:
                return super().load(args, store)
            except ValueError as error:
                raise ValueError(f"{self._url}: {error}") from error

    @override
    def key(self, args: Mapping[str, Any] | None = None, split: Any = None) -> str | None:
        # Not by the local files: a stored partition is found without a download.
        text = json.dumps([self._url, args, split, self.files], sort_keys=True, default=repr)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


_SOURCES: WeakKeyDictionary[Any, UrlSource] = WeakKeyDictionary()


def url_source(data: Any) -> UrlSource:
    """Returns the source of a datamodule; all calls return one object, which lists the remote folder once."""
    return _SOURCES.setdefault(data, UrlSource(data.source, data.partition_dir, data.partition_memory_limit, data.input_type))
