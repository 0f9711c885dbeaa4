"""Shared by all subpackages: argument checks, batches, chunks of rows, meshes of devices."""
