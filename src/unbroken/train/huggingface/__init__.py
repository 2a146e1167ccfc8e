"""What a checkpoint says so that its model is one of Hugging Face's, and back from there."""
