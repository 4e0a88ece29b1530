"""The channel between processes: ZeroMQ sockets, their keys, who may speak and who may not."""
