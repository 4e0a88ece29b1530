"""Channels between ranks and the process groups beneath TorchRec."""
