"""The channel between processes: ZeroMQ sockets, their CURVE keys, and admission of peers."""
