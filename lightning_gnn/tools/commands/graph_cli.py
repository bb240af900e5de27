"""Base of commands that inspect a partitioned graph without training; they take the files and keys of ``fit``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from typing_extensions import override

from lightning_gnn.console import plain_width, text_console
from lightning_gnn.datamodules import GraphDataModule
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies import DGCLStrategy, GNNStrategy
from lightning_gnn.strategy.scheme import Scheme
from lightning_gnn.tools.parser import Parser, check_names, file_of


class Option(NamedTuple):
    """Option of a command in addition to the keys of ``fit``."""

    kind: Any
    help: str
    default: Any = None


JSON = Option(str, "File for all numbers. (default: none is written)")


class GraphCLI(LightningCLI):
    """Command line that parses the files and options of ``fit`` and creates data and strategy, but no Trainer.

    Attributes:
        name, usage, description, options: description of the command, set by subclasses.
        width: width of output to a file, in characters; None for rich's default.
        wants_module, needs_module: whether the command creates a module if given, and whether it requires one.
        datamodule, module, strategy: configured objects; module is None if the command creates none or none is given.
        scheme, layout: scheme of the strategy, and its layout for the number of parts.
        console: console for output.
    """

    name = usage = description = ""
    options: ClassVar[Mapping[str, Option]] = {}
    width: int | None = None
    wants_module = False
    needs_module = False

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        self.console = text_console(plain_width(self.width), highlight=False, markup=False)
        super().__init__(
            L.LightningModule,
            GraphDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=False,
            parser_class=Parser,
            parser_kwargs={"prog": f"lightning-gnn {self.name}", "usage": self.usage, "description": self.description},
            run=False,
        )

    def prepare(self, parts: int) -> None:
        """Hook called to check the command's options; it may change the scheme.

        A ValueError ends the command with its message.
        """

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(self._arguments)

    @override
    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--parts", type=int, help="Number of parts. (default: trainer.devices x trainer.num_nodes)")
        for name, option in self.options.items():
            alone: dict[str, Any] = {"nargs": "?", "const": True} if option.kind is bool else {}
            parser.add_argument(f"--{name}", type=option.kind, default=option.default, help=option.help, **alone)
        parser.add_lightning_class_args(L.Trainer, "trainer")
        parser.add_lightning_class_args(L.LightningModule, "model", subclass_mode=True, required=False)
        parser.add_lightning_class_args(GraphDataModule, "data", subclass_mode=True)
        parser.add_method_arguments(L.Trainer, "fit", skip=set(self.subcommands()["fit"]))

    @override
    def instantiate_classes(self) -> None:
        check_names(self.parser, self.config.trainer.strategy, self.config.trainer.accelerator)
        # Loggers and callbacks may start processes, and the Trainer may need devices that this machine does not have.
        chosen = self.config.clone()
        for key in vars(chosen.trainer).keys() - {"strategy"}:
            chosen.trainer[key] = None
        chosen.optimizer = chosen.lr_scheduler = None
        if not self.wants_module:
            chosen.model = None
        elif chosen.model is None and self.needs_module:
            self.parser.error("a model is needed. Pass --model, or a file that names one, as for fit.")
        made = self.parser.instantiate(chosen)
        self.datamodule, self.module = made.data, made.get("model")
        self.strategy = self._strategy(made.trainer.strategy)
        self.scheme: Scheme = self.strategy.scheme
        try:
            parts = self._parts()
            self.prepare(parts)
            self._json = file_of("--json", self.config.get("json"))
            hosts = self.config.trainer.num_nodes
            self.layout: LayoutSpec = self.scheme.layout(parts, hosts if parts % hosts == 0 else 1)
        except ValueError as error:
            self.parser.error(str(error))

    def write_json(self, result: Any) -> None:
        """Write the file of ``--json``, if given, and print its name."""
        if self._json is not None:
            self._json.write_text(json.dumps(result, indent=1) + "\n")
            self.console.print(f"Written: {self._json}", soft_wrap=True)

    def _strategy(self, strategy: Any) -> GNNStrategy:
        if isinstance(strategy, str):
            strategy = DGCLStrategy() if strategy == "auto" else StrategyRegistry.get(strategy.lower())
        if not isinstance(strategy, GNNStrategy):
            self.parser.error(f"{type(strategy).__name__} does not split the graph. Use trainer.strategy=dgcl.")
        return strategy

    def _parts(self) -> int:
        trainer = self.config.trainer
        parts = self.config.parts if self.config.parts is not None else num_ranks(trainer.devices, trainer.num_nodes)
        if parts is None:
            raise ValueError(f"the number of parts must be known, got trainer.devices={trainer.devices}. Pass --parts.")
        if parts < 1:
            raise ValueError(f"--parts must be above 0, got {parts}.")
        return parts


def num_ranks(devices: Any, num_nodes: int) -> int | None:
    """Returns the number of ranks of a Trainer with these `devices`, without detecting devices; None if it depends on them."""
    if isinstance(devices, str):
        if devices.strip().lstrip("-").isdigit():
            devices = int(devices)
        elif devices.replace(",", "").replace(" ", "").isdigit():
            devices = [device for device in devices.split(",") if device.strip()]
        else:
            return None
    count = devices if isinstance(devices, int) else len(devices)
    return None if count < 0 else count * num_nodes


@contextmanager
def in_a_line() -> Iterator[None]:
    """Context manager that ends the command with a one-line message on errors."""
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"error: {error}")
