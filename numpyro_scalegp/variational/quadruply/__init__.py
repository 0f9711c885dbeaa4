"""Quadruply stochastic weight-space processes: chevron factors, relevance vectors, row updates."""
