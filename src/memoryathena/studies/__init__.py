"""Comparisons: conditions and seeds of one recipe, cell by cell."""
