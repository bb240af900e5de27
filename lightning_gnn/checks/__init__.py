"""Checks whether a model gives the results of one device."""
