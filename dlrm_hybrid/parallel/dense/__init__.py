"""Dense weights: masters on servers, replicas at workers; gradients go up, versions down."""
