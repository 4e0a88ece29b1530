"""Readers of raw rows: files of each format, as blocks of columns."""
