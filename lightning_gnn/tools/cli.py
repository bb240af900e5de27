"""Command line: LightningCLI's ``fit``, ``validate``, ``test``, ``predict``, and commands of this package."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from typing_extensions import override

import lightning_gnn
from lightning_gnn.callbacks.loggers import log_config
from lightning_gnn.datamodules import GraphDataModule
from lightning_gnn.tools.commands.advise import advise
from lightning_gnn.tools.commands.check import check
from lightning_gnn.tools.commands.compare import compare, demo
from lightning_gnn.tools.commands.doctor import doctor
from lightning_gnn.tools.commands.launch import launch
from lightning_gnn.tools.commands.partition import partition
from lightning_gnn.tools.commands.plan import plan
from lightning_gnn.tools.commands.self_test import is_self_test, self_test
from lightning_gnn.tools.commands.topology import topology
from lightning_gnn.tools.parser import Parser, check_names, did_you_mean

COMMANDS = {
    "demo": "see three strategies at work on a graph made on the spot, in about a minute",
    "fit": "train a model on a graph",
    "validate": "evaluate a model on the validation nodes",
    "test": "evaluate a model on the test nodes; without a model, with --ranks N, test the installation",
    "predict": "compute a model's output for every node",
    "partition": "partition a graph ahead of time, and show the parts",
    "plan": "show what a communication plan puts on each link, and what one exchange takes",
    "advise": "predict what an epoch takes under every scheme, and say why",
    "check": "hold one step of your model under every scheme against one device",
    "compare": "train under several strategies, and compare what they took and gave",
    "doctor": "check that this machine can train: versions, devices, exchange between ranks, store",
    "launch": "start the ranks of a script on one of several hosts, which continue without lost hosts",
    "topology": "measure how fast links between ranks are, or show a topology",
}

HELP = """usage: lightning-gnn COMMAND [options]

Train PyTorch Geometric models, unchanged, on one graph over several devices.

commands:
{commands}

examples:
  lightning-gnn partition --config configs/dgcl.yaml
  lightning-gnn advise --config configs/dgcl.yaml --parts 4
  lightning-gnn check --config configs/dgcl.yaml
  lightning-gnn fit --config configs/dgcl.yaml --trainer.max_epochs 20
  lightning-gnn compare --config configs/compare.yaml

All options of a command: lightning-gnn COMMAND --help
""".format(commands="\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items()))

SHORT = """lightning-gnn trains PyTorch Geometric models, unchanged, on one graph over several devices:

  demo                          three strategies on a graph made on the spot, in about a minute
  fit, validate, test, predict  your model and graph, of a file: --config FILE
  launch                        the ranks of a script, of which some may be lost, on several hosts
  check, advise, compare        is it exact? which strategy will be the fastest? which is?
  partition, plan, topology     the parts, what travels between them, and the links
  doctor, test                  can this machine train? is it exact: test --ranks 2

All commands, with examples: lightning-gnn --help
"""


class SaveConfig(SaveConfigCallback):
    """Callback that saves the run's configuration with its logs; no effect without a logger, as there is no folder of the run."""

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.loggers:
            # With a logger that has no folder per run, such as W&B, the file would be written to the working directory.
            self.save_to_log_dir = hasattr(type(trainer.loggers[0]), "log_dir")
            super().setup(trainer, pl_module, stage)

    @override
    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        log_config(trainer, json.loads(self.parser.dump(self.config, format="json")))


class TrainerCLI(LightningCLI):
    """LightningCLI that suggests the nearest known strategy for an unknown strategy."""

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)

    @override
    def before_instantiate_classes(self) -> None:
        assert self.subcommand is not None
        trainer = self.config[self.subcommand].trainer
        check_names(self._parser(self.subcommand), trainer.strategy, trainer.accelerator)


def run(command: str, arguments: Sequence[str]) -> None:
    own = {each.__name__: each for each in (demo, partition, plan, advise, check, compare, doctor, launch, topology)}
    if command == "test" and is_self_test(arguments):
        self_test(arguments)
        return
    if command in own:
        own[command](arguments)
        return
    TrainerCLI(
        L.LightningModule,
        GraphDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=SaveConfig,
        save_config_kwargs={"overwrite": True},
        parser_class=Parser,
        parser_kwargs={
            "prog": "lightning-gnn",
            # Replaces a list of all keys, which would hide the description.
            **{
                name: {"usage": f"lightning-gnn {name} --config FILE [--KEY VALUE ...]", "description": COMMANDS[name]}
                for name in TrainerCLI.subcommands()
            },
        },
        args=[command, *arguments],
    )


def main() -> None:
    command, *arguments = sys.argv[1:] or [""]
    if command in ("", "-h", "--help"):
        print(HELP if command else SHORT, end="")
        sys.exit(0)
    if command in ("completion", "--print-completion"):
        print("error: shell completion was removed. All options of a command: lightning-gnn COMMAND --help", file=sys.stderr)
        sys.exit(2)
    for name in lightning_gnn.__all__:
        getattr(lightning_gnn, name)  # lets the parser find these classes by their names alone
    if command in COMMANDS or command.startswith("-"):
        run(command, arguments)
    else:
        print(f"error: unknown command {command!r}{did_you_mean(command, COMMANDS)}\n", file=sys.stderr)
        print(HELP, end="", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
