# An image with this package, for containers and Kubernetes. The default has no CUDA. For GPUs, choose a base with CUDA and torch:
#   docker build --build-arg BASE=pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime --build-arg TORCH= .
# TORCH is the requirement of torch; empty if the base has torch. INDEX is a package index with CPU builds of torch; without it,
# pip installs torch for CUDA, which runs on CPUs and is gigabytes larger.
ARG BASE=python:3.11-slim
FROM ${BASE}

ARG TORCH=torch==2.13.0
ARG INDEX=
ARG EXTRAS=files,kaminpar

COPY pyproject.toml README.md LICENSE /build/
COPY lightning_gnn /build/lightning_gnn
# hadolint ignore=DL3013  # /build is this package, not a package of an index
RUN if [ -n "${TORCH}" ]; then pip install --no-cache-dir ${INDEX:+--index-url "${INDEX}"} "${TORCH}"; fi \
    && pip install --no-cache-dir "/build[${EXTRAS}]" \
    && rm -rf /build

RUN useradd --create-home --uid 1000 trainer
USER 1000
WORKDIR /home/trainer
CMD ["lightning-gnn", "doctor"]
