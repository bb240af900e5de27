"""self.log in every way, and what loggers get."""

from __future__ import annotations

import csv
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from idioms.harness import CLASSES, OURS, Case, graph
from idioms.plain import Net, idiom

FIT = ("fit", "test")


class Logs(Net):
    """Logs through :meth:`say`, which an idiom writes."""

    def say(self, name: str, loss: Tensor, rows: int) -> None:
        raise NotImplementedError

    def shared_step(self, batch: Any, mask: Tensor, stage: str) -> Tensor:
        loss = F.cross_entropy(self(batch.x, batch.edge_index)[mask], batch.y[mask])
        self.say(stage, loss, int(mask.sum()))
        return loss


def _says(how: Any, **trainer: Any) -> Case:
    class Module(Logs):
        def say(self, name: str, loss: Tensor, rows: int) -> None:
            how(self, name, loss, rows)

    return Case(Module(), graph(), trainer)


@idiom(source="Lightning docs: self.log with on_step, on_epoch and both", stages=FIT)
def on_step_and_on_epoch() -> Case:
    def how(module: Any, name: str, loss: Tensor, rows: int) -> None:
        module.log(f"{name}_both", loss, on_step=True, on_epoch=True)
        module.log(f"{name}_step", loss, on_step=True, on_epoch=False)
        module.log(f"{name}_epoch", loss, on_step=False, on_epoch=True, prog_bar=True, logger=True)
        module.log(f"{name}_bar_only", loss, prog_bar=True, logger=False)

    return _says(how)


@idiom(source="every DDP tutorial: self.log(..., sync_dist=True)", stages=FIT)
def sync_dist() -> Case:
    def how(module: Any, name: str, loss: Tensor, rows: int) -> None:
        module.log(f"{name}_loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        module.log_dict(
            {f"{name}_twice": 2 * loss, f"{name}_half": loss / 2}, sync_dist=True, on_step=False, on_epoch=True
        )

    return _says(how)


@idiom(
    source="Lightning docs: sync_dist=True with reduce_fx of sum, max and min",
    stages=FIT,
)
def sync_dist_with_other_reductions() -> Case:
    class Module(Net):
        def shared_step(self, batch: Any, mask: Tensor, stage: str) -> Tensor:
            out = self(batch.x, batch.edge_index)[mask]
            losses = F.cross_entropy(out, batch.y[mask], reduction="none")
            for how in ("sum", "max", "min"):
                self.log(
                    f"{stage}_{how}",
                    getattr(losses, how)(),
                    sync_dist=True,
                    reduce_fx=how,
                    on_step=False,
                    on_epoch=True,
                )
            return losses.mean()

    return Case(Module(), graph())


@idiom(
    source="Lightning docs: reduce_fx as a function, torch.sum and max",
    stages=FIT,
)
def reductions_as_functions() -> Case:
    class Module(Net):
        def shared_step(self, batch: Any, mask: Tensor, stage: str) -> Tensor:
            out = self(batch.x, batch.edge_index)[mask]
            losses = F.cross_entropy(out, batch.y[mask], reduction="none")
            self.log(f"{stage}_sum", losses.sum(), reduce_fx=torch.sum, on_step=False, on_epoch=True)
            self.log(f"{stage}_max", losses.max(), reduce_fx=max, on_step=False, on_epoch=True)
            self.log(f"{stage}_min", losses.min(), reduce_fx="min", on_step=False, on_epoch=True)
            return losses.mean()

    return Case(Module(), graph())


@idiom(source="Lightning docs: batch_size given to self.log", stages=FIT)
def batch_size_of_the_mask() -> Case:
    def how(module: Any, name: str, loss: Tensor, rows: int) -> None:
        module.log(f"{name}_loss", loss, batch_size=rows)
        module.log(f"{name}_synced", loss, batch_size=rows, sync_dist=True, on_epoch=True)

    return _says(how)


@idiom(
    source="a mean over all nodes, logged with their number as batch_size",
    stages=FIT,
)
def batch_size_of_all_nodes() -> Case:
    class Module(Net):
        def shared_step(self, batch: Any, mask: Tensor, stage: str) -> Tensor:
            out = self(batch.x, batch.edge_index)
            self.log(f"{stage}_norm", out.norm(dim=-1).mean(), batch_size=batch.num_nodes)
            return F.cross_entropy(out[mask], batch.y[mask])

    return Case(Module(), graph())


@idiom(
    source="Lightning docs: rank_zero_only=True",
    stages=FIT,
)
def logged_on_rank_zero_only() -> Case:
    return _says(lambda module, name, loss, rows: module.log(f"{name}_loss", loss, rank_zero_only=True))


@idiom(
    source="DDP habit: if self.trainer.is_global_zero: self.log(...)",
    refused="train_loss",
    stages=FIT,
)
def logged_if_global_zero() -> Case:
    def how(module: Any, name: str, loss: Tensor, rows: int) -> None:
        if module.trainer.is_global_zero:
            module.log(f"{name}_loss", loss)

    return _says(how)


@idiom(source="Lightning docs: add_dataloader_idx, metric_attribute, names with slashes, python numbers", stages=FIT)
def kinds_of_values_and_names() -> Case:
    def how(module: Any, name: str, loss: Tensor, rows: int) -> None:
        module.log(f"{name}/loss", loss.item())
        module.log(f"{name}/epoch", module.current_epoch)
        module.log(f"{name}/flag", torch.tensor(True).float(), add_dataloader_idx=False)
        module.log(f"{name}/vector", loss.view(1), prog_bar=True, on_epoch=True)
        module.log(f"{name}/float32", loss.float(), enable_graph=True)
        module.log(f"{name}/half", (loss / 2).detach().cpu())

    return _says(how, max_epochs=2)


@idiom(
    source="perplexity: exp of the loss logged",
    stages=FIT,
)
def perplexity() -> Case:
    return _says(lambda module, name, loss, rows: module.log(f"{name}_perplexity", loss.exp()))


@idiom(source="Lightning docs: log_dict of losses by name", stages=FIT)
def dicts_of_values() -> Case:
    class Module(Net):
        def shared_step(self, batch: Any, mask: Tensor, stage: str) -> Any:
            out = self(batch.x, batch.edge_index)[mask]
            parts = {"ce": F.cross_entropy(out, batch.y[mask]), "margin": F.multi_margin_loss(out, batch.y[mask])}
            self.log_dict({f"{stage}/{name}": value for name, value in parts.items()}, on_step=False, on_epoch=True)
            return {"loss": sum(parts.values()), **{name: value.detach() for name, value in parts.items()}}

    return Case(Module(), graph())


@idiom(source="a value that only some epochs log", stages=FIT)
def values_of_some_epochs() -> Case:
    def how(module: Any, name: str, loss: Tensor, rows: int) -> None:
        if module.current_epoch % 2 == 0:
            module.log(f"{name}_even", loss)

    return _says(how, max_epochs=4)


@idiom(
    source="a value logged under a condition that data decides, which may be so on one rank only",
    stages=FIT,
)
def values_logged_where_data_say_so() -> Case:
    class Module(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            chosen = batch.train_mask & (batch.y == CLASSES - 1)
            out = self(batch.x, batch.edge_index)
            if chosen.any():
                self.log("loss_in_a_class", F.cross_entropy(out[chosen], batch.y[chosen]))
            return F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])

    return Case(Module(), graph())


@idiom(
    source="Lightning docs: self.log in hooks: on_train_start is refused by Lightning, epoch hooks are not", stages=FIT
)
def logged_in_epoch_hooks() -> Case:
    class Module(Net):
        def on_train_epoch_start(self) -> None:
            self.log("train_begins", float(self.current_epoch))

        def on_train_epoch_end(self) -> None:
            self.log("weights", sum(p.norm() for p in self.parameters()), sync_dist=True)

        def on_validation_epoch_start(self) -> None:
            self.log("val_begins", 2.0)

        def on_validation_epoch_end(self) -> None:
            self.log("epoch_squared", float(self.current_epoch**2))

        def on_test_epoch_end(self) -> None:
            self.log("tested", 1.0)

    return Case(Module(), graph())


@idiom(source="the best value so far, logged at the end of each validation epoch", stages=FIT)
def best_value_so_far() -> Case:
    class Module(Net):
        best = float("inf")

        def on_validation_epoch_end(self) -> None:
            now = self.trainer.callback_metrics.get("val_loss")
            if now is not None and not self.trainer.sanity_checking:
                self.best = min(self.best, float(now))
                self.log("best_val_loss", self.best)

    return Case(Module(), graph(), {"max_epochs": 5})


@idiom(source="Lightning docs: CSVLogger, what its file holds", stages=("fit",))
def csv_logger() -> Case:
    class Module(Net):
        def on_train_end(self) -> None:
            self.logger.save()
            [path] = [*Path(folder.name).rglob("metrics.csv")] if self.trainer.is_global_zero else [None]
            lines = [*csv.DictReader(path.open())] if path else []
            found = [{k: float(v) for k, v in line.items() if v and not k.startswith(OURS)} for line in lines]
            rows.extend(self.trainer.strategy.broadcast([row for row in found if len(row) > 2]))

    folder, rows = TemporaryDirectory(), list[dict[str, float]]()
    return Case(Module(), graph(), {"logger": CSVLogger(folder.name)}, also=lambda: rows)


@idiom(source="Lightning docs: self.logger.log_metrics by hand", stages=("fit",))
def logger_called_by_hand() -> Case:
    class Module(Net):
        def on_train_epoch_end(self) -> None:
            self.logger.log_metrics(
                {"by_hand": float(self.trainer.callback_metrics["train_loss"])}, step=self.global_step
            )
            for logger in self.loggers:
                logger.log_metrics({"bias": float(self.conv2.lin_l.bias.sum())}, step=self.current_epoch)

    return Case(Module(), graph())


@idiom(
    source="TensorBoard habit: the step's own loss given to the logger",
    stages=("fit",),
)
def rank_values_given_to_the_logger() -> Case:
    class Module(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.logger.log_metrics({"loss_by_hand": float(loss)}, step=self.global_step)
            return loss

    return Case(Module(), graph())


@idiom(source="Lightning docs: several loggers, log_every_n_steps", stages=("fit",))
def several_loggers() -> Case:
    from idioms.harness import _Log

    second = _Log()
    case = Case(Net(), graph(), {"logger": [second], "log_every_n_steps": 2, "max_epochs": 5})
    case.also = lambda: second.given
    return case


@idiom(source="Trainer(logger=False): nothing but callback_metrics", stages=FIT)
def without_a_logger() -> Case:
    return Case(Net(), graph(), {"logger": False})
