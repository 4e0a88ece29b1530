"""What a trainer makes of its gradients before they go to the parameter servers."""
