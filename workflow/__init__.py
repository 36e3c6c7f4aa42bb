"""N3LO: train a neural network on many GPUs and find its best hyper-parameters."""
