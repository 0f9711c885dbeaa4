"""What every layer stands on: argument checks, jittered factorizations, work in chunks."""
