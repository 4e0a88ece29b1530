"""Emulated networks on one machine: hosts are namespaces, joined by shaped links."""
