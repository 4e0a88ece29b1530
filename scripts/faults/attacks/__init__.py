"""Attacks on the program, a module for each area; `attack.py` finds their `ATTACKS`."""
