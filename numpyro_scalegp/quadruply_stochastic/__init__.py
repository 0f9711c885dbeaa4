"""Steps whose cost grows neither with the rows of the data nor with the features."""
