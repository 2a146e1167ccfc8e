"""From live tensors into host memory, without holding the training up."""
