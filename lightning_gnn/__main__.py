"""``python -m lightning_gnn``: the command line."""

from lightning_gnn.tools.cli import main

if __name__ == "__main__":
    main()
