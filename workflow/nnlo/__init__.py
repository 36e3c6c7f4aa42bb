"""Studies of NNLO, read and written as studies of N3LO: `n3lo import-nnlo`."""
