"""Which scheme is the fastest here? Predicted before any rank is started; then trained under, and measured.

python examples/choose_scheme.py                    2 ranks of this machine
python examples/choose_scheme.py --ranks 4
"""

import argparse

import lightning as L
from torch_geometric.nn.models import GCN

from lightning_gnn import GraphDataModule, NodeClassifier, advise, planted_partition

FEATURES, CLASSES = 64, 8

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    L.seed_everything(0)
    data = GraphDataModule(planted_partition(options.nodes, num_classes=CLASSES, num_features=FEATURES))
    model = NodeClassifier(GCN(FEATURES, 64, num_layers=2, out_channels=CLASSES))

    found = advise(model, data, devices=options.ranks)
    for each in found:
        told = (
            f"{1e3 * each.seconds:7.1f} ms an epoch: {each.why}" if each.applies else f"does not apply: {each.reason}"
        )
        print(f"{each.candidate!s:<44} {'exact' if each.candidate.exact else 'approximate':<11} {told}")

    best = next(each for each in found if each.applies and each.candidate.exact)  # what is advised of these
    trainer = L.Trainer(
        strategy=best.candidate.strategy(start_method="spawn"),  # other ranks run the Trainer's calls, not this script
        devices=options.ranks,
        accelerator="cpu",
        max_epochs=options.epochs,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, datamodule=data)
    logged = trainer.callback_metrics
    seconds = options.nodes / logged["throughput/nodes_per_s"]
    print(
        f"{best.candidate}: {1e3 * best.seconds:.1f} ms an epoch predicted, the last one took {1e3 * seconds:.1f} ms."
    )
    print(f"Validation accuracy {logged['val_acc']:.3f}")
