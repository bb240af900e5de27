"""Command of this program, for ranks that run it again with equal options, arguments and folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from multiprocessing import parent_process

try:
    _FOLDER = os.getcwd()  # working directory at import: the program may change it later, and so do its ranks
except FileNotFoundError:
    _FOLDER = os.sep


def options() -> list[str]:
    """Returns Python's own options, such as ``-O``."""
    return _split(sys.orig_argv[1:])[0]


def command() -> tuple[list[str], str]:
    """Returns the command that runs this program again, and its working directory.

    Raises:
        RuntimeError: it cannot be run again; the message has the reason.
    """
    if parent_process() is not None:
        raise RuntimeError("this process was started by multiprocessing, without a program of its own")
    own, how, given = _split(sys.orig_argv[1:])
    main, python = sys.modules["__main__"], [sys.executable, *own]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if "ray/_private/workers/" in str(file):
        raise RuntimeError("Ray started it without a script (with lightning_gnn.ray, each worker of TorchTrainer is a rank)")
    if how == "-c" and file is None:
        return [*python, how, *given], _FOLDER
    if spec is not None and spec.name != "__main__":
        as_given = how == "-m" and spec.name in (given[0], f"{given[0]}.__main__")
        return [*python, "-m", *(given if as_given else [spec.name, *sys.argv[1:]])], _FOLDER
    if file is None or file == "<stdin>":
        raise RuntimeError("it was read from standard input, which can be read only once")
    path = os.path.join(_FOLDER, file)
    if spec is not None and os.path.basename(path) == "__main__.py":
        path = os.path.dirname(path)  # an archive or a folder
    if not os.path.exists(path):
        raise RuntimeError(f"its file {path} no longer exists")
    typed = given[0] if how == "" and given else ""
    if not typed or not path.endswith(os.path.join(os.sep, typed)):  # started for example by a debugger
        return [*python, path, *sys.argv[1:]], _FOLDER
    return [*python, path, *given[1:]], _FOLDER if os.path.isabs(typed) else path[: -len(typed)]


def _split(arguments: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Returns Python's own options without ``-i``, then ``-c``, ``-m`` or nothing for a file, and the remaining arguments."""
    options, left = list[str](), list(arguments)
    while left and left[0].startswith("-") and left[0] != "-":
        option = left.pop(0)
        if option.startswith("--"):
            options.append(option)
            if option == "--check-hash-based-pycs":
                options.append(left.pop(0))
            continue
        for place, letter in enumerate(option[1:], 2):
            rest = [option[place:]] if option[place:] else []
            if letter in "cm":
                return options, f"-{letter}", [*rest, *left]
            if letter in "WX":
                options += [f"-{letter}", *(rest or [left.pop(0)])]
                break
            if letter != "i":  # with -i, a rank would wait for input at its end
                options.append(f"-{letter}")
    return options, "", left
