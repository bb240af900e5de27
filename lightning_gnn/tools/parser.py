"""Parser of the command line: LightningCLI's parser with short errors that suggest the nearest known name."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import StrategyRegistry
from typing_extensions import override

import lightning_gnn


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Returns ``", did you mean ...?"`` with the nearest of the `choices`, or ``"."`` if none is near."""
    return _suggest(difflib.get_close_matches(word, list(choices), n=1))


def _suggest(matches: Sequence[str]) -> str:
    return f", did you mean {matches[0]!r}?" if matches else "."


def unknown_key(key: str, keys: Iterable[str]) -> str:
    """Returns the error for the first unknown part of the dotted `key`, with the nearest known key."""
    names = {".".join(parts[:end]) for parts in (k.split(".") for k in keys) for end in range(1, len(parts) + 1)}
    parts = key.split(".")
    wrong = next((p for end in range(1, len(parts) + 1) if (p := ".".join(parts[:end])) not in names), key)
    parent, _, last = wrong.rpartition(".")
    # Suggests siblings, or the same name elsewhere: a key may be given without its group, such as --max_epochs.
    siblings = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == parent}
    matches = [siblings[name] for name in difflib.get_close_matches(last, siblings, n=1)]
    matches += sorted(name for name in names if name.endswith(f".{last}"))
    return f"unknown key {wrong!r}{_suggest(matches)}"


def given_values(arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the values of a command line and its files, nested by key."""
    values: dict[str, Any] = {}
    for index, word in enumerate(arguments):
        if not word.startswith("-"):
            continue
        key, equals, text = word.lstrip("-").partition("=")
        key = key.replace("-", "_")  # as argparse names them
        if not equals:
            text = next((each for each in arguments[index + 1 : index + 2] if not each.startswith("--")), "")
        if key in ("config", "c"):
            try:
                content = yaml.safe_load(Path(text).read_text())
            except OSError:
                continue
            except yaml.YAMLError as error:
                raise ValueError(f"{text}: {error}") from error
            for name, value in (content if isinstance(content, dict) else {}).items():
                _put(values, str(name), value)
        else:
            try:
                _put(values, key, yaml.safe_load(text))
            except yaml.YAMLError:
                _put(values, key, text)
    return values


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; a class given by name remains the class of the values that are set inside it."""
    first, _, rest = key.partition(".")
    before = values.get(first)
    if not rest and not (isinstance(before, dict) and isinstance(value, dict)):
        values[first] = value
        return
    inside = values[first] = before if isinstance(before, dict) else {"class_path": before} if before else {}
    for name, each in ({rest: value} if rest else value).items():
        _put(inside, str(name), each)


def unknown_word(parser: argparse.ArgumentParser, values: Mapping[str, Any], parent: str = "") -> str | None:
    """Returns the error for the first unknown key, class or argument among `values`; None if all are known."""
    actions = {each.dest: each for each in parser._actions if each.dest.rpartition(".")[2] != "help"}
    for name, value in values.items():
        key, found = f"{parent}{name}", None
        if any(each.startswith(f"{key}.") for each in actions):
            found = unknown_word(parser, value, f"{key}.") if isinstance(value, Mapping) else None
        elif key in actions:
            hint = getattr(actions[key], "_typehint", None)
            kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
            plain = any(not inspect.isclass(kind) or kind.__module__ == "builtins" for kind in kinds)
            found = _unknown_in_class(value, None if plain else kinds[0])
        else:
            found = unknown_key(key, actions)
        if found:
            return found
    return None


def _unknown_in_class(value: Any, base: type | None = None) -> str | None:
    """Returns the error for an unknown argument of a class in YAML form, or in a list of classes; None if all are known."""
    if isinstance(value, list):
        return next(filter(None, map(_unknown_in_class, value)), None)
    if isinstance(value, str) and base is not None:
        value = {"class_path": value}
    if not isinstance(value, Mapping) or not ("class_path" in value or base):
        return None
    path = value.get("class_path", "")
    try:
        kind = _class_of(path) if isinstance(path, str) and path else base
    except LookupError as error:
        return str(error.args[0])
    if not inspect.isclass(kind):
        return None
    given = {name: each for name, each in value.items() if name not in ("class_path", "init_args", "dict_kwargs")}
    given |= value.get("init_args") or {}
    try:
        known = [name.removeprefix("x.") for name in ArgumentParser().add_class_arguments(kind, "x", fail_untyped=False)]
    except Exception:  # jsonargparse cannot parse the class, and reports it later
        return None
    for name, each in given.items():
        if name not in known:
            message = f"{path or kind.__name__} has no argument {name!r}" + did_you_mean(name, known)
            return message if message.endswith("?") or not known else f"{message} It has {', '.join(known)}."
        if found := _unknown_in_class(each):
            return found
    return None


def _class_of(path: str) -> Any:
    module, _, name = path.rpartition(".")
    if not module:
        if path not in lightning_gnn.__all__ and (suggestion := did_you_mean(path, lightning_gnn.__all__)) != ".":
            raise LookupError(f"there is no class {path!r}{suggestion}")
        return getattr(lightning_gnn, path, None)
    try:
        there = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise LookupError(f"{path}: there is no module {error.name!r}{did_you_mean(error.name or '', sys.modules)}") from error
    try:
        return getattr(there, name)
    except AttributeError as error:
        names = {*dir(there), *getattr(there, "__all__", ())}
        raise LookupError(f"{module} has no {name!r}{did_you_mean(name, names)}") from error
    except ImportError as error:  # the name was removed or renamed
        raise LookupError(str(error)) from error


class Parser(LightningArgumentParser):
    """LightningCLI's parser with errors that omit the list of all options and suggest the nearest known option."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error or "JSONARGPARSE_DEBUG" in os.environ:
            super().error(message, ex)  # type: ignore[misc]
        parser = getattr(ex, "subcommand_parser", None) or self
        command = parser.prog.replace(" [options]", "")
        arguments = self.args if getattr(self, "args", None) else sys.argv[1:]
        try:
            message = unknown_word(parser, given_values(arguments)) or message
        except ValueError as error:
            message = str(error)
        self.exit(2, f"error: {message}\nAll options: {command} --help\n")


def check_names(parser: LightningArgumentParser, strategy: object, accelerator: object) -> None:
    """Exit with an error if the Trainer's strategy or accelerator is a name that Lightning does not support."""
    for key, name, known in (
        ("strategy", strategy, StrategyRegistry.available_strategies()),
        ("accelerator", accelerator, [*AcceleratorRegistry.available_accelerators(), "gpu"]),
    ):
        if isinstance(name, str) and name.lower() not in (*known, "auto"):
            message = f"unknown {key} {name!r}" + did_you_mean(name.lower(), known)
            parser.error(message if message.endswith("?") else f"{message} There are {', '.join(known)}.")


def file_of(option: str, name: str | None) -> Path | None:
    """Returns the file named by an option, or None; raises ValueError if it cannot be written."""
    if name is None:
        return None
    check_folder(option, Path(name).parent)
    if Path(name).is_dir():
        raise ValueError(f"{option} {name} is a folder. Pass a file.")
    return Path(name)


def check_folder(option: str, folder: Path) -> None:
    """Create a folder and test that it is writable; raise ValueError with the name of the option if not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{option}: the folder {folder} cannot be written ({error}). Pass another folder.") from error
