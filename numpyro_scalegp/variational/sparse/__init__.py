"""Inducing points, trained by gradients or natural gradients."""
