"""The Dockerfile and the job for Kubernetes: linted and read, since neither Docker nor a cluster is available to tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from processes import REPOSITORY

DOCKERFILE, JOB = REPOSITORY / "Dockerfile", REPOSITORY / "configs" / "pytorchjob.yaml"


def test_the_dockerfile_passes_its_linter():
    command = [Path(sys.executable).with_name("hadolint"), "--no-color", DOCKERFILE]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert not found.returncode, found.stdout + found.stderr


def test_the_dockerfile_copies_what_the_build_reads():
    """Sources exist, and .dockerignore does not leave them out."""
    copied = [each for line in re.findall(r"^COPY (.*)", DOCKERFILE.read_text(), re.MULTILINE) for each in line.split()[:-1]]
    kept = re.findall(r"^!(.*)", (REPOSITORY / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(copied) == sorted(kept)
    assert all((REPOSITORY / each).exists() for each in copied)
    extras = re.search(r"^ARG EXTRAS=(.*)", DOCKERFILE.read_text(), re.MULTILINE)[1].split(",")  # type: ignore[index]
    known = re.findall(r"^(\w+) = \[", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(extras) <= set(known)


def test_the_job_starts_the_ranks_of_its_comment():
    """Two pods with two ranks each, which torchrun starts; each rank has a CPU."""
    job: dict[str, Any] = yaml.safe_load(JOB.read_text())
    pods = job["spec"]["pytorchReplicaSpecs"]
    assert (job["kind"], sorted(pods)) == ("PyTorchJob", ["Master", "Worker"])
    ranks = int(job["spec"]["nprocPerNode"])
    assert (sum(each["replicas"] for each in pods.values()), ranks) == (2, 2)
    for each in pods.values():
        spec = each["template"]["spec"]
        [container] = spec["containers"]
        assert container["name"] == "pytorch"  # the operator looks for this name
        assert container["command"][0] == "torchrun" and int(container["resources"]["limits"]["cpu"]) == ranks
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
        assert spec["securityContext"]["runAsUser"] == 1000
    assert "USER 1000" in DOCKERFILE.read_text()
