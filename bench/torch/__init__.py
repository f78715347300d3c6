"""PyTorch's training steps with ucudnn on and off."""
