"""atorch: train any PyTorch model as fast as the hardware allows."""
