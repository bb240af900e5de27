"""Numbers and addresses of ranks that change between generations."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from typing_extensions import override


@dataclass(frozen=True)
class Place:
    """Place of a rank in a generation.

    Attributes:
        rank, size: rank, and number of ranks.
        local_rank, local_size: number of the rank among the ranks of its host, and their number.
        host, hosts: number of the host, and number of hosts.
        address, port: address of the store of the ranks.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: int
    hosts: int
    address: str
    port: int


class Places(ClusterEnvironment):
    """Environment of a rank that the supervisor of its host has started; hosts may have different numbers of ranks.

    Attributes:
        place: current place of the rank.
    """

    def __init__(self, place: Place) -> None:
        self.place = place

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return self.place.address

    @property
    @override
    def main_port(self) -> int:
        return self.place.port

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return self.place.size

    @override
    def set_world_size(self, size: int) -> None:
        """No-op: the supervisor sets it."""

    @override
    def global_rank(self) -> int:
        return self.place.rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """No-op: the supervisor sets it."""

    @override
    def local_rank(self) -> int:
        return self.place.local_rank

    @override
    def node_rank(self) -> int:
        return self.place.host


def take_place(strategy: Any, place: Place) -> None:
    """Set the rank of this process, also for code of the user that reads environment variables."""
    numbers = {"RANK": place.rank, "WORLD_SIZE": place.size, "LOCAL_RANK": place.local_rank, "NODE_RANK": place.host}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    strategy.cluster_environment = Places(place)
    strategy.parallel_devices = strategy.parallel_devices[:1] * place.local_size
    strategy.num_nodes = place.hosts
    strategy.set_world_ranks()
