"""Tables and figures of the DCT paper (Gupta et al., KDD 2021) from finished runs."""
