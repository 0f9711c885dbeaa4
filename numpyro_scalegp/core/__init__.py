"""What every layer stands on: argument checks, jittered factorisations, work in chunks."""
