"""Models: build or load one, and find its expert tensors without names. Importing this package loads no torch."""
