"""How a likelihood depends on functions, and its expectation under their posterior."""
