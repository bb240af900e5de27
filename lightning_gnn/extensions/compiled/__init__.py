"""Compiled models: bound layers as operators of their graphs, and compiled models in steps with row semantics."""
