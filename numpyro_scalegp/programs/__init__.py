"""Compiled methods, and the variables that users' functions in their arguments read."""
