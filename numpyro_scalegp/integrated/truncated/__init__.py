"""Randomized truncation: Russian-roulette conjugate gradients and single-sample features."""
