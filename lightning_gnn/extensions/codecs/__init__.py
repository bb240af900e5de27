"""Codecs: messages between ranks in fewer bytes, with approximate results."""
