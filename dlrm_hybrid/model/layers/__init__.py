"""Dense layers: matrix products, MLPs and interactions; the speed of bfloat16."""
