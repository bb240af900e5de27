"""Reads what W&B has written of a run that it could not send: a LevelDB log of protobuf records."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK, _HEAD, _FILE_HEAD = 1 << 15, 7, 7
_FULL, _FIRST, _LAST = 1, 2, 4


@dataclass
class OfflineRun:
    """One run.

    Attributes:
        id, sweep: its own and its sweep's, ``""`` for none.
        config: as the loggers gave it.
        history: what was logged, a row per call.
        artifacts: the names of files by the artifact's name.
    """

    id: str = ""
    sweep: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    artifacts: dict[str, list[str]] = field(default_factory=dict)

    def last(self, name: str) -> Any:
        """Returns what was logged last under a name."""
        return next(row[name] for row in reversed(self.history) if name in row)


def offline_runs(folder: Path) -> list[OfflineRun]:
    """Returns all runs under a folder."""
    return [_read(path) for path in sorted(folder.rglob("run-*.wandb"))]


def _records(content: bytes) -> Iterator[bytes]:
    """Yields the records of a LevelDB log, which are split at blocks."""
    place, parts = _FILE_HEAD, b""
    while place + _HEAD <= len(content):
        left = _BLOCK - place % _BLOCK
        if left < _HEAD:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        place += _HEAD
        if kind in (_FULL, _FIRST):
            parts = b""
        parts += content[place : place + length]
        place += length
        if kind in (_FULL, _LAST):
            yield parts


def _read(path: Path) -> OfflineRun:
    from wandb.proto.wandb_internal_pb2 import Record

    found = OfflineRun()
    for content in _records(path.read_bytes()):
        record: Any = Record.FromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.id, found.sweep = record.run.run_id, record.run.sweep_id
        if kind in ("run", "config"):
            config = record.run.config if kind == "run" else record.config
            for item in config.update:
                keys, into = list(item.nested_key) or [item.key], found.config
                for key in keys[:-1]:
                    into = into.setdefault(key, {})
                into[keys[-1]] = json.loads(item.value_json)
        elif kind == "history":
            row = {}
            for item in record.history.item:
                row["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
            found.history.append(row)
        elif kind in ("artifact", "request") and (kind == "artifact" or record.request.HasField("log_artifact")):
            artifact = record.artifact if kind == "artifact" else record.request.log_artifact.artifact
            found.artifacts[artifact.name] = sorted(entry.path for entry in artifact.manifest.contents)
    return found
