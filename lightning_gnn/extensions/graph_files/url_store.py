"""Partition directories at URLs of fsspec: entries are downloaded to a local folder and read there; new entries are uploaded.

The local folder of a URL is in the local partition directory; its name is a digest of the URL. Ranks of other machines receive an
entry from the machine of rank 0, as with local folders. The manifest of an entry is uploaded last, so an entry with a manifest is
complete. It lists the files with their checksums, so that servers need not list folders.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_gnn.console import progress_bar
from lightning_gnn.data.store import LocalStore, checksum_of, default_root, write_atomically, writing
from lightning_gnn.extensions.graph_files.urls import RemoteFile, UrlFolder, attempt, checked_name, transfers


class UrlEntry(UrlFolder):
    """Entry of a partition directory at a URL, whose manifest lists its files."""

    checked_by = "checksum", "manifest.json"

    @override
    def _list_files(self) -> dict[str, RemoteFile]:
        try:
            listed = json.loads(self.read_text("manifest.json") or "")["files"]
            self._sums = {checked_name(name, self._url): str(checksum) for name, (_, checksum) in listed.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self._url} has no readable manifest.json ({error}). Remove the folder at this URL.") from error
        return {name: self._describe(name) for name in [*self._sums, "manifest.json"]}

    @override
    def _checksum_of(self, file: Path) -> str:
        return str(checksum_of(file))

    def download(self, target: Path) -> None:
        """Download all files; the folder `target` appears complete or not at all."""
        with self._hold_lock(target.parent):
            if not target.exists():
                self._download(target.parent)
                with writing(target.parent):
                    Path(self._folder).replace(target)
                    shutil.rmtree(self._parts)

    def upload(self, files: list[Path]) -> None:
        """Upload files in order."""
        system, root = self._remote

        def put(file: Path) -> None:
            with transfers():
                if "file" in system.protocol:  # object stores have no folders
                    system.makedirs(root, exist_ok=True)
                system.put_file(str(file), self._path(file.name))

        with progress_bar(f"Uploading to {self._url}", sum(file.stat().st_size for file in files), "bytes") as advance:
            for file in files:
                attempt(partial(put, file), f"File {file.name} of {self._url}", "uploaded")
                advance(file.stat().st_size)


class UrlStore(LocalStore):
    """Partition directory at a URL.

    Args:
        location: URL of the folder, as fsspec reads it.
    """

    def __init__(self, location: str) -> None:
        digest = hashlib.blake2b(location.encode(), digest_size=12).hexdigest()
        super().__init__(str(default_root() / f"{digest}.store"))
        self.location = location.rstrip("/")

    @override
    def fetch(self, name: str) -> None:
        target, is_note = self.folder / name, name.endswith(".known")
        if target.exists():
            return
        remote = UrlEntry(self.location if is_note else f"{self.location}/{name}", self.folder)
        found = attempt(partial(remote.read_text, name if is_note else "manifest.json"), f"{self.location}/{name}")
        if found is not None and is_note:
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                write_atomically(target, found)
        elif found is not None:
            remote.download(target)

    @override
    def publish(self, name: str) -> None:
        local, url = self.folder / name, f"{self.location}/{name}"
        remote = UrlEntry(url if local.is_dir() else self.location, self.folder)
        files = sorted(local.iterdir(), key=lambda file: file.name == "manifest.json") if local.is_dir() else [local]
        if remote.is_http:
            rank_zero_info(f"{url} is not uploaded: http:// and https:// are read only. Copy {local} to the server.")
            return
        try:
            if local.is_file() or remote.read_text("manifest.json") is None:
                remote.upload([file for file in files if file.name != "verified.json"])
        except Exception as error:  # the partition is stored locally, and training can begin
            rank_zero_warn(f"{error} The entry is in {local} only: later runs on other machines partition the graph again.")
