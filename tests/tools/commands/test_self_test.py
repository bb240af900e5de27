"""``lightning-gnn test --ranks N``: a good installation passes, and each part fails if what it tests is broken."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from processes import Finished, run
from test_cli import answer

from lightning_gnn.tools.commands import self_test as self_testing
from lightning_gnn.tools.commands.self_test import PARTS, is_self_test, self_test
from lightning_gnn.tools.local_ranks import run_ranks

COMMAND = ("-m", "lightning_gnn", "test")
BROKEN = Path(__file__).parent / "broken_ranks.py"


@pytest.mark.slow
def test_an_installation_passes(tmp_path):
    output = run(*COMMAND, "--ranks", 2, "--device", "cpu", cwd=tmp_path).succeeded().output
    assert "lightning-gnn test: cpu" in output
    assert "exchanges │ 2     │ ok  exact over shared memory and gloo" in output
    assert "training  │ 2     │ ok  dgcl, spmm, vertex_cut equal one device" in output
    assert "lost rank │ 2     │ ok  rank 1 ended, and the other ranks raised an error that names it" in output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("part", "broken", "reason"),
    [
        ("exchanges", "rows", "start_expand brings other rows"),
        pytest.param("training", "steps", "'dgcl' must give losses and weights of one device", marks=pytest.mark.campaign),
        pytest.param("lost rank", "names", "must name rank 1, got Connection reset by peer", marks=pytest.mark.campaign),
        pytest.param("lost rank", "ends", "ranks must end within 2 s", marks=pytest.mark.campaign),
    ],
)
def test_a_broken_part_fails(part, broken, reason, monkeypatch, capsys):
    def run_broken_ranks(arguments: list[str], *rest: Any, **named: Any) -> str:
        return run_ranks([str(BROKEN), *arguments[2:]], *rest, **named)

    monkeypatch.setenv("BROKEN", broken)
    monkeypatch.setattr(self_testing, "run_ranks", run_broken_ranks)
    monkeypatch.setattr(self_testing, "PARTS", {part: PARTS[part]})
    with pytest.raises(SystemExit) as ended:
        self_test(["--ranks=2", "--device=cpu"])
    output = capsys.readouterr().out
    assert ended.value.code == 1
    assert f"│ {part} " in output and "│ failed " in output
    last, advice = output.splitlines()[-2:]
    assert last.startswith(f"{part}: ") and reason in last and advice == f"  {PARTS[part]}"


def test_a_part_that_does_not_end_fails(monkeypatch, capsys):
    monkeypatch.setattr(self_testing, "PARTS", {"exchanges": PARTS["exchanges"]})
    with pytest.raises(SystemExit) as ended:
        self_test(["--ranks=2", "--device=cpu", "--timeout=0.1"])
    assert ended.value.code == 1
    assert "exchanges: two processes did not finish within 0 s" in capsys.readouterr().out


@pytest.mark.campaign
def test_two_hosts(tmp_path):
    """Both on this machine, with one rank each; only the first prints the table."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def run_host(node_rank: str) -> Finished:
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": node_rank}
        arguments = ("--hosts", "127.0.0.1,localhost", "--ranks", 1, "--device", "cpu")
        return run(*COMMAND, *arguments, cwd=tmp_path, variables=variables)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run_host, "01")
    assert first.code == second.code == 0, first.output + second.output
    assert first.output.count("│ 2     │ ok ") == len(PARTS) and "│" not in second.output


def test_hosts_without_a_node_rank_print_their_commands(capsys, monkeypatch):
    monkeypatch.delenv("NODE_RANK", raising=False)
    self_test(["--ranks", "4", "--hosts", "10.0.0.1,10.0.0.2"])
    command = "lightning-gnn test --ranks 4 --hosts 10.0.0.1,10.0.0.2"
    assert capsys.readouterr().out.splitlines() == [
        f"MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 NODE_RANK=0 {command}  # on 10.0.0.1",
        f"MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 NODE_RANK=1 {command}  # on 10.0.0.2",
    ]


@pytest.mark.parametrize(
    ("arguments", "variables", "reason"),
    [
        (["--ranks=0"], {}, "--ranks must be at least 1, got 0."),
        (["--hosts=a,,b"], {}, "--hosts must be addresses with commas between"),
        (["--ranks=2", "--device=tpu"], {}, "--device must be auto, cpu or cuda, got 'tpu'."),
        (["--ranks=99", "--device=cuda"], {}, "--device cuda needs a GPU for each of 99 ranks"),
        (["--ranks=2", "--timeout=0"], {}, "--timeout must be above 0"),
        (["--ranks=2", "--devcie=cpu"], {}, "did you mean 'device'?"),
        (["--hosts=a,b"], {"NODE_RANK": "2"}, "below the number of --hosts, 2, got 2."),
        (["--ranks=2"], {"RANK": "0"}, "Start it once per machine"),
    ],
)
def test_invalid_arguments(arguments, variables, reason, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, said = answer(["test", *arguments], monkeypatch, capsys)
    assert code == 2 and reason in said and "All options: lightning-gnn test --ranks 2 --help" in said


def test_a_model_is_still_evaluated(monkeypatch, capsys):
    assert is_self_test([]) and is_self_test(["--ranks", "2"]) and is_self_test(["--hosts=a,b"])
    assert not is_self_test(["--config", "dgcl.yaml"]) and not is_self_test(["--help"])
    code, said = answer(["test", "--help"], monkeypatch, capsys)
    assert code == 0 and "lightning-gnn test --config FILE" in said and "--ranks N" in said
