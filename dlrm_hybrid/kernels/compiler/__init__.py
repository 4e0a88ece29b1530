"""How kernels are compiled, when, and where what is compiled is kept."""
