"""Dense weights: masters on servers, replicas at workers; or masters at all trainers."""
