"""PCIe devices and network ports from files as Linux has them below /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_gnn.extensions.plans.hardware import (
    HOST_BRIDGE,
    NUMA_NODE,
    ONE_SWITCH,
    PCIE3_X16,
    SYSTEM,
    PCIeDevice,
    interfaces,
    pcie_device,
    rdma_ports,
)


class Tree:
    """A folder with the files below /sys that are read.

    Paths of devices are written like ``"pci0000:15/0000:15:01.0/0000:16:00.0"``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def device(self, path: str, speed: str = "32.0 GT/s PCIe", width: int = 16, numa_node: int = 0) -> Path:
        """Adds a device, and the bridges above it with links as fast; it is idle."""
        folder = self.root / "devices"
        for part in Path(path).parts:
            folder = folder / part
            folder.mkdir(parents=True, exist_ok=True)
            files = {"max_link_speed": speed, "current_link_speed": "2.5 GT/s PCIe", "current_link_width": width}
            for name, value in (files | {"numa_node": numa_node}).items():
                if not part.startswith("pci") and not (folder / name).exists():
                    (folder / name).write_text(f"{value}\n")
        self._link(self.root / "bus/pci/devices" / folder.name, folder)
        return folder

    def rdma(
        self, name: str, path: str, rate: str = "400 Gb/sec (4X NDR)", state: str = "4: ACTIVE", port: int = 1
    ) -> None:
        folder = self.root / f"class/infiniband/{name}/ports/{port}"
        folder.mkdir(parents=True)
        (folder / "rate").write_text(f"{rate}\n")
        (folder / "state").write_text(f"{state}\n")
        if port == 1:
            self._link(self.root / f"class/infiniband/{name}/device", self.root / "devices" / path)

    def interface(self, name: str, path: str | None, speed: str = "100000", state: str = "up") -> None:
        folder = self.root / "class/net" / name
        folder.mkdir(parents=True)
        (folder / "speed").write_text(f"{speed}\n")
        (folder / "operstate").write_text(f"{state}\n")
        if path is not None:
            (self.root / "devices" / path).mkdir(parents=True, exist_ok=True)
            self._link(folder / "device", self.root / "devices" / path)

    @staticmethod
    def _link(name: Path, target: Path) -> None:
        name.parent.mkdir(parents=True, exist_ok=True)
        name.symlink_to(target)


def found(tree: Tree, path: str) -> PCIeDevice:
    device = pcie_device(path.rpartition("/")[2], tree.root)
    assert device is not None
    return device


def test_what_two_devices_have_in_common(tmp_path):
    tree = Tree(tmp_path)
    gpu = "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0"
    others = {
        "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0": (0, ONE_SWITCH),
        "pci0000:15/0000:15:01.0/0000:1b:00.0/0000:1c:00.0/0000:1d:00.0": (0, ONE_SWITCH),  # by way of several
        "pci0000:15/0000:15:02.0/0000:1a:00.0": (0, HOST_BRIDGE),
        "pci0000:27/0000:27:01.0/0000:28:00.0": (0, NUMA_NODE),
        "pci0000:a7/0000:a7:01.0/0000:a8:00.0": (1, SYSTEM),
        "pci10000:e0/10000:e0:06.0/10000:e1:00.0": (-1, SYSTEM),
    }
    tree.device(gpu)
    for path, (numa_node, ancestor) in others.items():
        tree.device(path, numa_node=numa_node)
        other = found(tree, path)
        assert other.path == tuple(path.split("/"))
        assert found(tree, gpu).common_ancestor(other) == other.common_ancestor(found(tree, gpu)) == ancestor
    nowhere = [PCIeDevice((bridge, "0000:01:00.0"), -1, None) for bridge in ("pci0000:01", "pci0000:02")]
    assert nowhere[0].common_ancestor(nowhere[1]) == SYSTEM  # unknown nodes are not one
    assert pcie_device("0000:99:00.0", tmp_path) is None


@pytest.mark.parametrize(
    ("speed", "width", "gb_per_s"),
    [
        ("2.5 GT/s", 16, 4.0),
        ("5 GT/s", 8, 4.0),
        ("8.0 GT/s PCIe", 16, PCIE3_X16),
        ("16.0 GT/s PCIe", 16, 31.51),
        ("32.0 GT/s PCIe", 16, 63.02),
        ("32.0 GT/s PCIe", 8, 31.51),
        ("Unknown", 16, None),
        ("8.0 GT/s PCIe", 0, None),
    ],
)
def test_links(tmp_path, speed, width, gb_per_s):
    tree, path = Tree(tmp_path), "pci0000:15/0000:15:01.0/0000:16:00.0"
    tree.device(path, speed, width)
    assert found(tree, path).gb_per_s == (gb_per_s and pytest.approx(gb_per_s, rel=1e-3))


def test_a_link_is_as_fast_as_its_slower_end(tmp_path):
    tree, path = Tree(tmp_path), "pci0000:15/0000:15:01.0/0000:16:00.0"
    (tree.device(path) / "../max_link_speed").write_text("16.0 GT/s PCIe\n")
    assert found(tree, path).gb_per_s == pytest.approx(31.51, rel=1e-3)


def test_ports_that_are_up(tmp_path):
    tree = Tree(tmp_path)
    assert rdma_ports(tmp_path) == interfaces(tmp_path) == []
    slow, fast = "pci0000:15/0000:15:01.0/0000:16:00.0", "pci0000:15/0000:15:02.0/0000:17:00.0"
    tree.device(slow, "8.0 GT/s PCIe", 8)
    tree.device(fast)
    tree.rdma("mlx5_0", fast)
    tree.rdma("mlx5_0", fast, "200 Gb/sec (4X HDR)", port=2)
    tree.rdma("mlx5_1", fast, state="1: DOWN")
    tree.rdma("mlx5_2", slow)
    tree.rdma("mlx5_3", fast, rate="")
    assert [(port.name, port.gb_per_s) for port in rdma_ports(tmp_path)] == [
        ("mlx5_0:1", 50.0),
        ("mlx5_0:2", 25.0),
        ("mlx5_2:1", pytest.approx(PCIE3_X16 / 2)),  # of its slot
    ]
    assert rdma_ports(tmp_path)[0].device == found(tree, fast)

    tree.interface("eth0", fast, "25000")
    tree.interface("eth1", fast, "25000", "down")
    tree.interface("virtual", f"{slow}/virtio0", "-1")
    tree.interface("virtio", f"{slow}/virtio1", "10000")
    tree.interface("usb0", "platform/usb", "1000")
    tree.interface("bond0", None, "50000")
    tree.interface("silent", fast)
    (tmp_path / "class/net/silent/speed").unlink()
    (tmp_path / "class/net/silent/speed").mkdir()  # no read succeeds, as where a driver has no answer
    (tmp_path / "class/net/bonding_masters").write_text("bond0\n")
    up = {port.name: port for port in interfaces(tmp_path)}
    assert {name: port.gb_per_s for name, port in up.items()} == {"eth0": 3.125, "virtio": 1.25, "usb0": 0.125}
    assert up["virtio"].device == found(tree, slow) and up["usb0"].device is None
    assert [(port.name, port.gb_per_s) for port in interfaces(tmp_path, "bond0")] == [("bond0", 6.25)]
    assert interfaces(tmp_path, "eth1") == interfaces(tmp_path, "eth9") == []
