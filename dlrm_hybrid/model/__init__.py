"""DLRM: MLPs, dot interaction, embedding tables and their optimizers."""
