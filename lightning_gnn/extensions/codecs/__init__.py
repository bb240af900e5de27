"""Rows in fewer bytes between ranks, approximately."""
