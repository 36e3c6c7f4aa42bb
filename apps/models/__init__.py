"""The models that come with N3LO, one a file."""
