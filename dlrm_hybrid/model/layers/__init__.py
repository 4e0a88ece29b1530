"""The dense layers: matrix products, MLPs, interactions; how fast bfloat16 is."""
