"""How the magnitude is found from which elements leave: one rule per file."""
