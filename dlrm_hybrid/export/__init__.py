"""Models for others: written as files that need nothing of this package, and read from theirs."""
