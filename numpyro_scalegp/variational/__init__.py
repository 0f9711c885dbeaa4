"""Variational families for functions and their guides, a folder for each family."""
