"""Running models and guides, and reading the sites of Gaussian processes off their traces."""
