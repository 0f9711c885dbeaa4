"""Running models and guides, and reading GP sites and likelihoods off their traces."""
