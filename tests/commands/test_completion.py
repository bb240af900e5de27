"""What shells complete: scripts of commands and options, which start nothing."""

from __future__ import annotations

import io
import shutil
import subprocess
from contextlib import redirect_stdout

import pytest

from lightning_gnn import cli
from lightning_gnn.commands.completion import SHELLS, print_completion

BASH = shutil.which("bash")
CASES = [
    (["pa"], {"partition"}),
    (["--p"], {"--print-completion"}),
    (["fit", "--trainer.max_e"], {"--trainer.max_epochs"}),
    (["fit", "--config=some.yaml", "--data.so"], {"--data.source", "--data.source_args"}),
    (["check", "--trainer.strategy", "dg"], {"dgcl"}),
    (["fit", "--trainer.strategy", "=", "cov"], {"cover"}),  # as bash divides --trainer.strategy=cov
    (["fit", "--trainer.strategy", "="], {"dgcl", "sampling", "DGCLStrategy", "auto_gnn"}),
    (["fit", "--model", "Node"], {"NodeClassifier"}),
    (["partition", "--dry-run", "--col"], {"--columns"}),
    (["plan", "--topology", "dgx"], {"dgx1", "dgx1x2"}),
    (["topology", ""], {"measure", "show"}),
    (["topology", "show", "sum"], {"summit"}),
    (["topology", "measure", "--no"], {"--no-shared-memory"}),
    (["fit", "--config", ""], set()),  # bash goes on with files
    (["nothing", ""], set()),
]


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    made = {}
    for shell in SHELLS:
        with redirect_stdout(io.StringIO()) as printed:
            print_completion([shell], cli.COMMANDS, cli.run)
        made[shell] = printed.getvalue()
    return made


@pytest.mark.skipif(BASH is None, reason="no bash")
def test_bash_completes(scripts):
    ask = 'COMP_WORDS=(lightning-gnn "$@"); COMP_CWORD=$#; _lightning_gnn; echo "${COMPREPLY[@]}"; COMPREPLY=()'
    lines = [f"set -- {' '.join(map(repr, words))}; {ask}" for words, _ in CASES]
    assert BASH is not None
    done = subprocess.run(
        [BASH, "--norc"],
        input=scripts["bash"] + "\n".join(lines),
        env={"PATH": "/nowhere"},  # nothing is started
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not done.stderr
    for (words, expected), found in zip(CASES, done.stdout.splitlines(), strict=True):
        if len(words[-1]) > 1:
            assert set(found.split()) == expected, words
        else:
            assert set(found.split()) >= expected and (expected or not found), words


def test_each_shell_has_all_commands_and_options(scripts):
    for shell, script in scripts.items():
        dashes = "-l " if shell == "fish" else "--"
        for word in (*cli.COMMANDS, *(f"{dashes}{name}" for name in ("trainer.devices", "again", "megabytes", "json"))):
            assert f" {word}" in script or f"'{word}" in script, (shell, word)


def test_another_shell_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        print_completion(["fsh"], cli.COMMANDS, cli.run)
    assert ended.value.code == 2 and "did you mean 'fish'?" in capsys.readouterr().err
