"""Observations on the product of several axes, such as places and times."""
