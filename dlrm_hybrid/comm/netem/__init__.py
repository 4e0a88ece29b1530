"""A network of its own on one machine: hosts that are namespaces, joined by shaped links."""
