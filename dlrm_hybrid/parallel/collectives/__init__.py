"""Rounds in which trainers reduce something through a server before they push."""
