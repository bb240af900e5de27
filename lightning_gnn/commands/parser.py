"""The command line's parser: LightningCLI's, with errors of a few lines that name the nearest known word."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import StrategyRegistry
from typing_extensions import override

import lightning_gnn


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns ``", did you mean ...?"`` with the nearest of the `known` words, or ``"."`` if none is near."""
    return _ask(difflib.get_close_matches(word, list(known), n=1))


def _ask(near: Sequence[str]) -> str:
    return f", did you mean {near[0]!r}?" if near else "."


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Says where the dotted `key` leaves the `known` ones, and names the nearest."""
    names = {".".join(parts[:end]) for parts in (k.split(".") for k in known) for end in range(1, len(parts) + 1)}
    parts = key.split(".")
    wrong = next((p for end in range(1, len(parts) + 1) if (p := ".".join(parts[:end])) not in names), key)
    parent, _, last = wrong.rpartition(".")
    # Among its siblings, or of the same name elsewhere: a key given without its group, such as --max_epochs.
    siblings = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == parent}
    near = [siblings[name] for name in difflib.get_close_matches(last, siblings, n=1)]
    near += sorted(name for name in names if name.endswith(f".{last}"))
    return f"unknown key {wrong!r}{_ask(near)}"


def unknown_option(class_path: str, option: str) -> str:
    """Says that a class has no such argument, and names the nearest that it has."""
    try:
        module, _, name = class_path.rpartition(".")
        bases = getattr(importlib.import_module(module), name).__mro__
    except (ImportError, AttributeError, ValueError):
        bases = ()
    parameters = [p for base in bases if "__init__" in vars(base) for p in inspect.signature(base.__init__).parameters]
    known = sorted({*parameters} - {"self", "args", "kwargs", "options"})
    option = option.partition(".")[0]
    message = f"{class_path} has no argument {option!r}" + did_you_mean(option, known)
    return message if message.endswith("?") or not known else f"{message} It has {', '.join(known)}."


def explain(message: str, known: Iterable[str]) -> str | None:
    """Returns what is wrong in a line, with the nearest known word, if `message` of jsonargparse is about an unknown one.

    Args:
        message: as the parser has it.
        known: the parser's keys.
    """
    # Innermost first: the class whose argument it is follows those that contain it.
    if found := re.search(r"given class_path '([\w.]+)':\s+Option '([^']+)' is not accepted", message):
        return unknown_option(*found.groups())
    if found := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message):
        module, name = found.groups()
        return f"{module} has no {name!r}" + did_you_mean(name, dir(sys.modules.get(module, object)))
    if found := re.search(r"Expected a dot import path string: (\S+)", message):
        option = re.search(r'Parser key "([\w.]+)".*NestedArg\(key=\'([\w.]+)\'', message, re.DOTALL)
        where = f"{option[1]}.{option[2]}: arguments need a class, and " if option else ""
        return f"{where}there is no class {found[1]!r}" + did_you_mean(found[1], lightning_gnn.__all__)
    if found := re.search(r"No module named '([\w.]+)'", message):
        path = re.search(rf"\b{re.escape(found[1])}\.[\w.]+", message)
        where = f"{path[0]}: " if path else ""
        return f"{where}there is no module {found[1]!r}" + did_you_mean(found[1], sys.modules)
    if found := re.search(r"ption '([^']+)' is not accepted|does not accept option '([^']+)'", message):
        return unknown_key(found[1] or found[2], known)
    if found := re.search(r"unrecognized arguments: (.*)", message):
        options = [word[2:].partition("=")[0] for word in found[1].split() if word.startswith("--")]
        return "; ".join(unknown_key(option, known) for option in options) or None
    return None


class Parser(LightningArgumentParser):
    """LightningCLI's parser; its errors leave out the list of all options and name the nearest known one."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error or "JSONARGPARSE_DEBUG" in os.environ:
            super().error(message, ex)  # type: ignore[misc]
        parser = getattr(ex, "subcommand_parser", None) or self
        known = [action.dest for action in parser._actions if action.dest != "help"]
        command = parser.prog.replace(" [options]", "")
        if "Problems parsing config" in message:  # it tells the line, but of which file
            files = re.findall(r"--config[= ](\S+)", " ".join(sys.argv))
            message = f"{', '.join(files)}: {message}" if files else message
        self.exit(2, f"error: {explain(message, known) or message}\nAll options: {command} --help\n")


def check_names(parser: LightningArgumentParser, strategy: object, accelerator: object) -> None:
    """Ends with an error if the Trainer's strategy or accelerator is given by a name that Lightning does not know."""
    for key, name, known in (
        ("strategy", strategy, StrategyRegistry.available_strategies()),
        ("accelerator", accelerator, [*AcceleratorRegistry.available_accelerators(), "gpu"]),
    ):
        if isinstance(name, str) and name.lower() not in (*known, "auto"):
            message = f"unknown {key} {name!r}" + did_you_mean(name.lower(), known)
            parser.error(message if message.endswith("?") else f"{message} There are {', '.join(known)}.")
