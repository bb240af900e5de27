"""``lightning-gnn --print-completion SHELL``: a script by which a shell completes commands and options, and starts nothing."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import Strategy

import lightning_gnn
from lightning_gnn.parser import ASK, OptionsAsked, Parser, did_you_mean
from lightning_gnn.planning.presets import PRESETS
from lightning_gnn.strategies import registered


@dataclass(frozen=True)
class Words:
    """What may follow the words of a command: its options, and the known values behind a word."""

    options: Sequence[str]
    values: Mapping[str, Sequence[str]]


def print_completion(
    arguments: Sequence[str], commands: Mapping[str, str], run: Callable[[str, Sequence[str]], None]
) -> None:
    """Prints the script for the shell that is named.

    Args:
        arguments: behind ``--print-completion``.
        commands: what each command does, by its name.
        run: runs a command with arguments.
    """
    shell = " ".join(arguments)
    if shell not in SHELLS:
        print(f"error: --print-completion {' or '.join(SHELLS)}{did_you_mean(shell, SHELLS)}", file=sys.stderr)
        sys.exit(2)
    words: dict[str, Words] = {}
    for name in commands:
        parts = ("measure", "show") if name == "topology" else ()
        for part in parts or ("",):
            words[f"{name} {part}".rstrip()] = _words(_parser(run, name, part), part or name)
        if parts:
            words[name] = Words((), {name: parts})
    print(SHELLS[shell](commands, words), end="")


def _parser(run: Callable[[str, Sequence[str]], None], name: str, part: str) -> Parser:
    try:
        run(name, [part, ASK] if part else [ASK])
    except OptionsAsked as asked:
        of_commands: Any = asked.parser._subcommands_action
        return of_commands._name_parser_map[name] if of_commands else asked.parser
    raise AssertionError(f"{name} has parsed nothing")


def _words(parser: Parser, command: str) -> Words:
    options: list[str] = []
    values: dict[str, Sequence[str]] = {}
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        names = [name for name in action.option_strings if name.startswith("--") and not name.endswith("+")]
        options += names
        if (known := _values(action)) and not action.dest.endswith(".help"):
            values |= dict.fromkeys(names or [command], known)
        if action.dest == "data":
            of_data = ArgumentParser().add_class_arguments(lightning_gnn.GraphDataModule, "data", fail_untyped=False)
            options += [f"--{name}" for name in of_data]
    return Words(sorted(dict.fromkeys(options)), values)


def _values(action: argparse.Action) -> list[str]:
    """Returns the words that an option takes, as far as its type names them."""
    if action.dest == "topology":
        return list(PRESETS)
    if action.choices:
        return [str(each) for each in action.choices]
    kind = getattr(action, "_typehint", None)
    found: list[str] = []
    for each in _alternatives(kind):
        if get_origin(each) is Literal:
            found += [str(word) for word in get_args(each) if word is not None]
        elif each is bool:
            found += ["true", "false"]
        elif inspect.isclass(each) and each.__module__ != "builtins":
            if each is Strategy:  # in forms for the command line
                found += [name for name in registered() if not name.endswith(("_spawn", "_notebook"))]
            classes = [name for name in lightning_gnn.__all__ if inspect.isclass(getattr(lightning_gnn, name))]
            found += [name for name in classes if issubclass(getattr(lightning_gnn, name), each)]
    return list(dict.fromkeys(found))


def _alternatives(kind: Any) -> Iterator[Any]:
    if get_origin(kind) in (Literal, None):
        yield kind
    elif type(None) in get_args(kind) or "Union" in str(get_origin(kind)):
        for each in get_args(kind):
            yield from _alternatives(each)


_BASH = """# lightning-gnn's commands and options, for bash.
_lightning_gnn() {
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]} words= options=
    case $current in =) current= ;; *) [[ $before != = ]] || before=${COMP_WORDS[COMP_CWORD-2]} ;; esac
    [[ $command != topology || $COMP_CWORD -eq 2 ]] || command="topology ${COMP_WORDS[2]}"
    if ((COMP_CWORD == 1)); then
        words='@commands@' options='--help --print-completion'
    else
        case $command in
@cases@
        esac
    fi
    [[ $current != -* ]] || words=$options
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o bashdefault -o default -F _lightning_gnn lightning-gnn
"""


def _bash(commands: Mapping[str, str], words: Mapping[str, Words]) -> str:
    cases = []
    for name, each in words.items():
        cases += [
            f"        '{name}')",
            f"            options='{' '.join(each.options)}'",
            "            case $before in",
        ]
        for known in dict.fromkeys(map(tuple, each.values.values())):
            before = "|".join(before for before, those in each.values.items() if tuple(those) == known)
            cases += [f"            {before}) words='{' '.join(known)}' ;;"]
        cases += ["            esac ;;"]
    return _BASH.replace("@commands@", " ".join(commands)).replace("@cases@", "\n".join(cases))


def _zsh(commands: Mapping[str, str], words: Mapping[str, Words]) -> str:
    return "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" + _bash(commands, words)


def _fish(commands: Mapping[str, str], words: Mapping[str, Words]) -> str:
    lines = [
        "# lightning-gnn's commands and options, for fish.",
        "function __lightning_gnn_at",
        "    string match -q -- \"lightning-gnn $argv *\" (string join -- ' ' (commandline -opc))' '",
        "end",
    ]
    for name, text in commands.items():
        lines.append(f'complete -c lightning-gnn -f -n __fish_use_subcommand -a {name} -d "{text}"')
    for name, each in words.items():
        at = f"complete -c lightning-gnn -n '__lightning_gnn_at {name}'"
        for option in each.options:
            known = each.values.get(option)
            lines.append(f"{at} -l {option[2:]}" + (f" -x -a '{' '.join(known)}'" if known else ""))
        for before, known in each.values.items():
            if not before.startswith("-"):
                lines.append(f"{at} -n 'test (commandline -opc)[-1] = {before}' -a '{' '.join(known)}'")
    return "\n".join(lines) + "\n"


SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
