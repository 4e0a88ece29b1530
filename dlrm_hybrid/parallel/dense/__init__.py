"""Dense weights: masters on servers, mirrors at workers, gradients up and updates down."""
